"""The stages of the pipeline, each a command of its own, and the driver that runs them in order."""
