"""`backend: vllm` without vLLM: what it would be told, what is refused, and how a replica would run it.

`tests/interop/test_vllm_server.py` holds the same against vLLM's own source.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from models import DRAFTER, ROOT, save_random_checkpoint

from lilicorr.checkpoint.__main__ import convert
from lilicorr.tiny import tiny_target_folder
from serve_app.args import AppArgs
from serve_app.vllm_backend import VLLMEndpoint, parsed, serve_arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and checkpoints that vLLM reads and does not read."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "lilicorr", target, 0, drafter=replace(DRAFTER, num_candidates=4))
    save_random_checkpoint(folder / "three candidates", target, 0)
    save_random_checkpoint(folder / "dflash", target, 0, "argmax", {})
    convert(folder / "lilicorr", folder / "numbered", "modelopt")
    for form in ("zlab", "speculators"):
        convert(folder / "dflash", folder / form, form)
    return folder


def arguments(folder: Path, checkpoint: str = "lilicorr", **fields: Any) -> AppArgs:
    fields = {"target": str(folder / "target"), "target_dtype": "bfloat16", "gpus": 2, **fields}
    return AppArgs(backend="vllm", checkpoint=str(folder / checkpoint), **fields)


def test_the_command_line(folder: Path) -> None:
    engine = {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False, "kernel_config": {"a": 1}}
    drafts = {"method": "dflash", "model": str(folder / "lilicorr"), "num_speculative_tokens": 3}
    assert serve_arguments(arguments(folder, engine=engine, max_model_len=256, model_name="m")) == [
        *("--model", str(folder / "target"), "--served-model-name", "m", "--dtype", "bfloat16"),
        *("--max-model-len", "256", "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--speculative-config", json.dumps(drafts)),
        *("--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching", "--kernel-config", '{"a": 1}'),
    ]
    for published in ("dflash", "zlab", "speculators"):
        assert "--speculative-config" in serve_arguments(arguments(folder, published))


@pytest.mark.parametrize(
    ("checkpoint", "fields", "message"),
    [
        ("three candidates", {}, "cannot be served by vLLM: vllm needs lilicorr_candidate_topk 1 or 2"),
        (
            "numbered",
            {},
            "not spelled as vLLM reads it: python -m lilicorr.checkpoint convert .*numbered CONVERTED --to",
        ),
        ("lilicorr", {"mask_token_id": 260}, "mask_token_id is 259, the target's is set to 260"),
        ("nothing", {}, "is not a draft model"),
    ],
)
def test_what_vllm_cannot_draft_with_is_refused(
    folder: Path, checkpoint: str, fields: dict[str, Any], message: str
) -> None:
    from serve_app.app import build_app

    with pytest.raises(ValueError, match=message):
        build_app(arguments(folder, checkpoint, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "gpus must be a whole number of at least 1 with backend vllm, got 0"),
        ({"gpus": 1.5}, "gpus must be a whole number"),
        ({"max_queue": 3}, "max_queue has no effect with backend vllm: leave it out, got 3"),
        ({"admin_key_file": "k"}, "admin_key_file has no effect"),
        ({"yarn": {"factor": 2}}, "yarn has no effect"),
        ({"engine": {"model": "other"}}, "engine.model stands outside of engine: set target"),
        ({"engine": {"speculative_config": {}}}, "engine.speculative_config stands outside of engine"),
        ({"engine": {"api-key": "k"}}, "engine.api-key must be spelled with underscores: api_key"),
        ({"engine": {"--model": "other"}}, "engine.--model must be spelled with underscores: model"),
        ({"engine": {"port": 9000}}, "engine.port stands outside of engine: set http_options of the Serve config"),
        ({"engine": {"config": "f"}}, "engine.config stands outside of engine: its settings stand in engine"),
        ({"engine": {"default_chat_template_kwargs": {}}}, "stands outside of engine: set template_kwargs"),
        ({"engine": {"data_parallel_size": 2}}, "stands outside of engine: set num_replicas"),
        ({"engine": {"cudagraph_capture_sizes": [1]}}, "engine.cudagraph_capture_sizes must be a text, a number"),
        ({"engine": {"tensor_parallel_size": 4}}, "must be gpus = 2, got \\(4, 1\\)"),
        ({"engine": {"pipeline_parallel_size": "2"}}, "must be gpus = 2, got \\(2, '2'\\)"),
        ({"backend": "sglang"}, "backend"),
    ],
)
def test_arguments_that_do_not_fit_it_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AppArgs(**{"backend": "vllm", "checkpoint": "c", "gpus": 2, **fields})


def test_arguments_survive_a_config_and_the_gpus_may_be_split(folder: Path) -> None:
    args = arguments(folder, gpus=4, engine={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    assert AppArgs(**args.model_dump()) == args
    words = serve_arguments(args)
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and words.count("--tensor-parallel-size") == 1


def test_the_config_file_is_what_serve_and_the_application_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve_app import scale
    from serve_app.app import RETRY_AFTER_S, build_app

    config = yaml.safe_load((ROOT / "serve_app" / "config.vllm.yaml").read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    args, (endpoint,) = AppArgs.model_validate(application["args"]), application["deployments"]
    assert args.backend == "vllm" and args.gpus > 1
    monkeypatch.setattr("serve_app.app.serve_arguments", lambda args: [])  # its checkpoint is an example
    deployed = build_app(args)._bound_deployment
    assert deployed.name == endpoint["name"] == scale.DEPLOYMENT
    assert deployed.ray_actor_options["num_gpus"] == args.gpus
    assert endpoint["max_ongoing_requests"] == deployed.max_ongoing_requests
    assert endpoint["backpressure_config"] == {"status_code": 503, "retry_after_s": RETRY_AFTER_S}
    scaling = endpoint["autoscaling_config"]
    assert scaling["target_ongoing_requests"] < endpoint["max_ongoing_requests"]
    assert "autoscaling_policy" not in application  # ours reads what our engine reports
    assert "vllm" not in sys.modules


class FakeEngine:
    """vLLM's, as far as a replica asks it."""

    model_config, ended, broken = SimpleNamespace(name="a model"), False, False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def check_health(self) -> None:
        if self.broken:
            raise RuntimeError("the engine is dead")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The modules of vLLM that a replica imports, around an engine."""
    engine = FakeEngine()

    def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("model", "served-model-name", "dtype", "distributed-executor-backend"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--tensor-parallel-size", type=int)
        for name in ("default-chat-template-kwargs", "speculative-config"):
            parser.add_argument(f"--{name}", type=json.loads)
        parser.set_defaults(api_key=None)
        return parser

    @asynccontextmanager
    async def build_async_engine_client(_arguments: argparse.Namespace) -> AsyncIterator[FakeEngine]:
        yield engine
        engine.ended = True

    def build_app(arguments: argparse.Namespace, tasks: tuple[str, ...], model: Any) -> FastAPI:
        app = FastAPI()

        @app.get("/told")
        def told() -> dict[str, Any]:
            return {**vars(arguments), "tasks": tasks, "model_config": model.name, "engine": app.state.ready}

        return app

    async def init_app_state(
        given: FakeEngine, state: Any, _arguments: argparse.Namespace, _tasks: tuple[str, ...]
    ) -> None:
        state.ready = given is engine

    contents = {
        "vllm.entrypoints.common.cli_args": [make_arg_parser],
        "vllm.entrypoints.launchers.api_server.app_state": [init_app_state],
        "vllm.entrypoints.launchers.api_server.entry": [build_async_engine_client],
        "vllm.entrypoints.launchers.app": [build_app],
        "vllm.utils.argparse_utils": [],
    }
    for name, functions in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for function in functions:
            setattr(sys.modules[name], function.__name__, function)
    sys.modules["vllm.entrypoints.common.cli_args"].validate_parsed_serve_args = lambda arguments: None
    sys.modules["vllm.utils.argparse_utils"].FlexibleArgumentParser = argparse.ArgumentParser
    return engine


@pytest.mark.filterwarnings("ignore:coroutine .VLLMEndpoint.__del__")  # the collector calls it again, and nobody waits
def test_a_replica_runs_the_engine_with_its_own_http_side(folder: Path, tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    args = arguments(folder, api_key_file=str(tmp_path / "keys"))
    bare = VLLMEndpoint.__mro__[1]  # without what Serve wraps around it

    async def run() -> Any:
        replica = bare.__new__(bare)
        await bare.__init__(replica, args)
        await replica.check_health()
        engine.broken = True
        with pytest.raises(RuntimeError, match="the engine is dead"):
            await replica.check_health()
        app = replica.__serve_build_asgi_app__()
        assert not engine.ended
        await bare.__del__(replica)
        return app

    with TestClient(asyncio.run(run())) as client:
        told = client.get("/told").json()
    assert engine.ended
    assert told["speculative_config"]["model"] == args.checkpoint and told["tensor_parallel_size"] == 2
    assert told["api_key"] == ["one", "two"] and told["engine"] and told["tasks"] == ["generate"]


def test_a_setting_that_vllm_does_not_know_is_refused(folder: Path, engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match="vLLM 0.33.0 does not take --model .*--made-up 3"):
        parsed(serve_arguments(arguments(folder, engine={"made_up": 3})))
