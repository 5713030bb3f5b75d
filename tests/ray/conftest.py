"""The fixtures of `training_runs`, for the tests of the training stage."""

from training_runs import config, in_process, inputs  # noqa: F401
