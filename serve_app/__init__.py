"""The endpoint: an OpenAI-compatible chat API over the speculative decoder, hosted by Ray Serve."""
