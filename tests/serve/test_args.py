"""What an application may be told, and what it is told when that is wrong."""

from __future__ import annotations

import pytest

from lilicorr.config import EngineConfig
from serve_app.args import AppArgs


def test_engine_fields_reach_the_engine() -> None:
    args = AppArgs(
        checkpoint="c", max_model_len=512, max_queue=3, engine={"max_running": 5, "kv_gib": 2, "deterministic": True}
    )
    assert args.engine_config == EngineConfig(max_running=5, max_model_len=512, kv_gib=2.0, deterministic=True)
    assert args.max_requests == 8
    assert AppArgs(checkpoint="c").engine_config == EngineConfig()  # a default stands once
    assert AppArgs(**args.model_dump()) == args  # as a Serve config carries them


def test_objects_may_come_as_json() -> None:
    """`serve run` passes nothing but strings."""
    args = AppArgs(
        checkpoint="c", engine='{"max_running": 4}', yarn='{"factor": 2}', template_kwargs="{}", max_queue="3"
    )
    assert (args.engine, args.yarn, args.template_kwargs) == ({"max_running": 4}, {"factor": 2}, {})
    assert args.max_requests == 7


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"engine": {"max_runing": 4}}, "engine.max_runing.*did you mean engine.max_running"),
        ({"engine": {"max_running": "4"}}, "engine.max_running must be int"),
        ({"engine": {"max_running": 0}}, "max_running must be at least 1"),
        ({"engine": {"num_pages": 4, "kv_gib": 1.0}}, "num_pages or kv_gib, not both"),
        ({"engine": {"max_model_len": 4}}, "set max_model_len"),
        ({"max_queue": 96}, "must be below max_ongoing_requests = 128"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"engine": "{"}, "engine\n.*must be a JSON object, got"),
        ({"engine": "[1]"}, "engine\n.*valid dictionary"),
        ({"max_running": 4}, "max_running"),
    ],
)
def test_wrong_arguments_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AppArgs(checkpoint="c", **fields)
