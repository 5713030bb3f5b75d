"""lilicorr: block speculative decoding with likelihood-correlated parallel drafts."""

__version__ = "0.1.0"
