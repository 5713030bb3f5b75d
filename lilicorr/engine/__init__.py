"""The fast decoder: batched speculative decoding over a paged cache, exact.

`engine.Engine` is the way in; `decode.Decoder` says what every answer must be.
"""
