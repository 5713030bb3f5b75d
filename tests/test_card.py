"""The model card says what a checkpoint is, and a checkpoint can be published: against a hub of this machine."""

from __future__ import annotations

import base64
import json
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lilicorr.checkpoint import read_checkpoint, write_checkpoint
from lilicorr.checkpoint.card import model_card
from lilicorr.checkpoint.format import NATIVE, SPECULATORS
from lilicorr.checkpoint.hub import push_to_hub
from lilicorr.config import TargetConfig
from lilicorr.provenance import sha256_tree
from lilicorr.target import Target
from test_checkpoint_command import command
from test_convert import make

NAMED = "--target Qwen/Qwen3-8B --revision abc123"
INFO = {
    "target": {
        "source": "Qwen/Qwen3-8B",
        "revision": "abc123",
        "tokenizer_hash": "beef",
        "template_hash": "f00d",
    },
    "template_kwargs": {"enable_thinking": False},
    "corpus": {"fingerprint": "0123456789abcdef", "rows": 1200, "tokens": 345678},
    "run": "lilicorr",
    "steps": 2000,
    "num_blocks": 751462,
    "max_anchors": 12,
    "loss": 1.25,
    "tau": 3.5,
    "commit": "238be89",
}


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def card_of(target: Target, form: str, head: str, info: dict[str, Any]) -> str:
    checkpoint = make(target, form, head)
    return model_card(checkpoint.description, info, [form] if form != NATIVE else ["sglang", "vllm"])


def test_the_card_says_what_it_is_for_whom_and_how_to_serve_it(target: Target) -> None:
    card = card_of(target, NATIVE, "lilicorr", INFO)
    matter = yaml.safe_load(card.split("---")[1])
    assert matter["base_model"] == "Qwen/Qwen3-8B" and "speculative-decoding" in matter["tags"]
    for row in (
        "| method | LiLiCorr |",
        "| block layout | in place |",
        "| drafted width | 4 tokens a block |",
        "| target | Qwen/Qwen3-8B |",
        "| revision | abc123 |",
        "| tokenizer, sha256 | beef |",
        "| corpus, fingerprint | 0123456789abcdef |",
        "| corpus | 1,200 rows, 345,678 tokens |",
        "| optimizer steps | 2000 |",
        "| blocks seen | 751,462 |",
        "| last loss | 1.2500 |",
        "| commit | 238be89 |",
    ):
        assert row in card, row
    assert "| reasoning | off: trained on answers without reasoning" in card and "logit_scale 8.0" in card
    settings = '{"method": "dflash", "model": "CHECKPOINT", "num_speculative_tokens": 4}'
    assert f"vllm serve Qwen/Qwen3-8B --revision abc123 --speculative-config '{settings}'" in card
    assert "--model-path Qwen/Qwen3-8B --revision abc123 --speculative-draft-model-path" in card
    assert "--speculative-algorithm DFLASH --speculative-num-draft-tokens 5" in card
    assert "serve run serve_app.app:build_app checkpoint=CHECKPOINT target=Qwen/Qwen3-8B" in card
    assert "CONVERTED" not in card and card.count("the name of this folder on a hub") == 2
    assert "Acceptance length" not in card


def test_what_is_unknown_is_left_out_and_what_no_server_reads_is_said(target: Target) -> None:
    card = card_of(target, NATIVE, "lilicorr", {})
    assert "Training" not in card and "reasoning" not in card and "base_model" not in card and "None" not in card
    assert "--revision" not in card and "rows" not in card_of(target, NATIVE, "lilicorr", {"corpus": {"rows": 9}})
    folder = card_of(target, NATIVE, "argmax", {"target": "./models/mine"})
    assert "base_model" not in folder and "# DFlash draft model for ./models/mine" in folder
    domino = card_of(target, "domino", "domino", {})
    assert "Not vLLM: vllm has no checkpoints of the head domino" in domino and "anchor-first" in domino
    assert "--speculative-algorithm DFLASH --speculative-num-draft-tokens 5" in domino  # the block size, as it runs it
    dspark = card_of(target, NATIVE, "dspark", INFO)
    assert '"method": "dspark"' in dspark
    assert "--speculative-algorithm DSPARK --speculative-num-draft-tokens 6" in dspark  # with the bonus token
    thinking = card_of(target, NATIVE, "dspark", INFO | {"template_kwargs": {"enable_thinking": True}})
    assert "| reasoning | on: trained on answers with reasoning" in thinking


@pytest.mark.parametrize(
    ("form", "head", "converted"),
    [
        (NATIVE, "lilicorr", []),
        ("vllm", "lilicorr", []),
        ("modelopt", "lilicorr", ["vllm", "sglang"]),
        ("zlab", "argmax", []),
        ("zlab_old", "argmax", []),
        (NATIVE, "dspark", []),
        ("specforge_old", "dspark", [f"vllm {NAMED}", f"sglang {NAMED}"]),
        ("specforge_old", "domino", ["sglang"]),
        (SPECULATORS, "argmax", ["sglang"]),
        (SPECULATORS, "dspark", [f"sglang {NAMED}"]),
    ],
)
def test_the_card_gives_commands_that_take_its_folder(
    target: Target, tmp_path: Path, form: str, head: str, converted: list[str]
) -> None:
    """A server that does not read the folder as it stands is started with a copy in its own spelling."""
    write_checkpoint(tmp_path / "final", replace(make(target, form, head), info=INFO), form)
    lines = (tmp_path / "final" / "README.md").read_text().splitlines()
    wanted = [f"    python -m lilicorr.checkpoint convert CHECKPOINT CONVERTED --to {name}" for name in converted]
    assert [line for line in lines if "checkpoint convert" in line] == wanted
    commands = [line for line in lines if "vllm serve" in line or "sglang.launch_server" in line]
    assert len(commands) == (1 if head == "domino" else 2)
    for command_line in commands:
        server = "vllm" if "vllm serve" in command_line else "sglang"
        copied = any(name.startswith(server) for name in converted)
        assert ("CONVERTED" in command_line) == copied != ("CHECKPOINT" in command_line)
    assert "CHECKPOINT stands for this folder's absolute path." in lines


def test_vllm_reads_a_draft_vocabulary_in_the_format_of_its_library(target: Target, tmp_path: Path) -> None:
    part = make(target, SPECULATORS, "argmax", torch.arange(9))
    write_checkpoint(tmp_path / "final", part, SPECULATORS)
    card = (tmp_path / "final" / "README.md").read_text()
    assert "vllm serve a/target --speculative-config" in card and "CONVERTED" not in card
    assert "Not SGLang: sglang knows no draft vocabulary" in card


def test_a_target_that_only_this_library_knows_is_a_folder_for_the_others(target: Target, tmp_path: Path) -> None:
    card = card_of(target, NATIVE, "dspark", {"target": {"source": "embedded", "architectures": ["A"]}})
    assert "target=embedded " in card and "resolve_target(TargetConfig('embedded'))" in card
    assert "vllm serve TARGET " in card and "--model-path TARGET " in card
    converted = card_of(target, "specforge", "dspark", {"target": "embedded"})
    assert "--target embedded" in converted and "vllm serve TARGET " in converted
    assert "TARGET stands" not in card_of(target, NATIVE, "dspark", INFO)
    write_checkpoint(
        tmp_path / "final", replace(make(target, SPECULATORS, "argmax"), info={"target": "random"}), SPECULATORS
    )
    assert json.loads((tmp_path / "final" / "config.json").read_text())["speculators_config"]["verifier"] == {
        "name_or_path": None,
        "architectures": [],
    }
    assert read_checkpoint(tmp_path / "final").info["target"] == "random"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "results.json is missing"),
        ("{}", "results.json holds no evaluation: field systems is missing"),
        ('{"systems": [1]}', "field systems must be an object"),
        ('{"systems": {"lilicorr": {"aime": {}}}}', "field tau of lilicorr on aime is missing"),
        (
            '{"systems": {"lilicorr": {"aime": {"tau": "3"}}}}',
            "field tau of lilicorr on aime must be a number of at least 0, got '3'",
        ),
        (
            '{"systems": {"lilicorr": {"aime": {"tau": 3, "tau_ci95": [1]}}}}',
            "the interval of lilicorr on aime must be",
        ),
        ('{"systems": {"lilicorr": {}}, "checkpoints": {"lilicorr": "beef"}}', "is of another checkpoint than .*own"),
        ('{"systems": {"lilicorr": {}}, "provenance": {"config": 5}}', "field config must be an object, got 5"),
        ("{", "results.json is not JSON"),
    ],
)
def test_results_that_are_none_become_one_line(
    target: Target, tmp_path: Path, content: str | None, message: str
) -> None:
    write_checkpoint(tmp_path / "own", replace(make(target, NATIVE, "lilicorr"), info=INFO))
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        command("convert", tmp_path / "own", tmp_path / "no", "--to", "vllm", "--results", tmp_path / "results.json")
    assert not (tmp_path / "no").exists()


def test_a_target_that_is_none_and_a_push_without_a_login_become_one_line(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "own", make(target, NATIVE, "lilicorr"))

    def load_target(config: TargetConfig) -> Target:
        raise OSError(f"{config.source} is not a valid model identifier")  # as transformers says it

    monkeypatch.setattr("lilicorr.checkpoint.__main__.load_target", load_target)
    with pytest.raises(SystemExit, match="error: no/where is not a valid model identifier"):
        command("inspect", tmp_path / "own", "--target", "no/where")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(SystemExit, match="error: no login on the model hub"):
        command("push", tmp_path / "own", "me/draft")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {}])
def test_the_command_of_the_card_is_one_that_the_endpoint_takes(
    target: Target, kwargs: dict[str, Any], dtype: str
) -> None:
    """`serve run` passes what stands behind the = as a string; what a GPU has trained decodes on one."""
    from serve_app.args import AppArgs

    description = replace(make(target, NATIVE, "lilicorr").description, dtype=dtype)
    card = model_card(description, INFO | {"template_kwargs": kwargs}, [])
    (line,) = (line for line in card.splitlines() if line.strip().startswith("serve run "))
    program, run, builder, *arguments = shlex.split(line)
    assert (program, run, builder) == ("serve", "run", "serve_app.app:build_app")
    args = AppArgs(**dict(argument.split("=", 1) for argument in arguments))
    assert args.checkpoint == "CHECKPOINT" and args.target == "Qwen/Qwen3-8B" and args.template_kwargs == kwargs
    assert args.target_revision == "abc123"
    assert (args.target_dtype, args.gpus) == (("bfloat16", 1.0) if dtype == "bfloat16" else ("float32", 0.0))


def test_convert_puts_an_evaluation_into_the_card(target: Target, tmp_path: Path) -> None:
    checkpoint = make(target, NATIVE, "lilicorr")
    write_checkpoint(tmp_path / "own", replace(checkpoint, info=INFO))
    figures = {"tau": 3.17, "tau_ci95": [2.88, 3.49], "speedup": 1.12}
    results = {"systems": {"lilicorr": {"held_out": figures, "aime": {"tau": None}}}}
    results |= {"checkpoints": {"lilicorr": sha256_tree(tmp_path / "own")}}
    results |= {"provenance": {"config": {"evaluate": {"temperature": 0.0, "sampled_temperature": 0.6}}}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "sampled.json").write_text(json.dumps(results | {"seeds": [1, 2]}))
    more = ("--to", "vllm", "--results", tmp_path / "results.json")
    command("convert", tmp_path / "own", tmp_path / "vllm", *more)
    card = (tmp_path / "vllm" / "README.md").read_text()
    assert "| held_out | 0 | 3.17 | 2.88 to 3.49 | 1.12 |" in card and "aime" not in card
    command("convert", tmp_path / "vllm", tmp_path / "back", "--to", "native")
    assert "| held_out | 0 | 3.17 |" in (tmp_path / "back" / "README.md").read_text()
    sampled = (*more[:3], tmp_path / "sampled.json")
    command("convert", tmp_path / "own", tmp_path / "sampled", *sampled)
    assert "| held_out | 0.6 | 3.17 |" in (tmp_path / "sampled" / "README.md").read_text()
    with pytest.raises(SystemExit, match="results.json is of another checkpoint than .*vllm: lilicorr was measured"):
        command("convert", tmp_path / "vllm", tmp_path / "no", *more)
    with pytest.raises(SystemExit, match="has the systems lilicorr, not 'dflash'"):
        command("convert", tmp_path / "own", tmp_path / "no", *more, "--system", "dflash")


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as an upload of small files asks for; it keeps what it was given."""

    repositories: dict[str, dict[str, Any]]
    files: dict[str, bytes]

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    def _answer(self, values: dict[str, Any]) -> None:
        data = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer({"id": "me/draft", "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.repositories[asked["name"]] = asked
            self._answer({"url": f"http://{self.headers['Host']}/me/draft", "name": "me/draft"})
        elif self.path.startswith("/api/models/me/draft/preupload/"):
            files = json.loads(body)["files"]
            regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._answer({"files": [{"path": file["path"]} | regular for file in files]})
        elif self.path.startswith("/api/models/me/draft/commit/"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://{self.headers['Host']}/me/draft/commit/{'1' * 40}"
            self._answer({"success": True, "commitUrl": url, "commitOid": "1" * 40})
        else:
            self._answer({"errors": [], "warnings": []})  # of the card's head matter


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hub]]]:
    """The address of a hub and what it has been given."""
    kept = type("Kept", (Hub,), {"repositories": {}, "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}", kept
    server.shutdown()
    server.server_close()
    thread.join()


def test_push_uploads_the_whole_folder_and_it_loads_again(
    target: Target, tmp_path: Path, hub: tuple[str, type[Hub]]
) -> None:
    endpoint, kept = hub
    checkpoint = make(target, SPECULATORS, "argmax")
    write_checkpoint(tmp_path / "final", checkpoint, SPECULATORS)
    address = push_to_hub(tmp_path / "final", "me/draft", private=True, endpoint=endpoint)
    assert address.endswith("1" * 40)
    asked = kept.repositories["draft"]  # versions of the client spell it in two ways
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert set(kept.files) == {"README.md", "config.json", "lilicorr.json", "model.safetensors"}
    (tmp_path / "down").mkdir()
    for name, data in kept.files.items():
        (tmp_path / "down" / name).write_bytes(data)
    down = read_checkpoint(tmp_path / "down", target)
    assert all(torch.equal(down.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())


def test_nothing_broken_or_without_a_card_is_published(
    target: Target, tmp_path: Path, hub: tuple[str, type[Hub]]
) -> None:
    endpoint, kept = hub
    write_checkpoint(tmp_path / "final", make(target, NATIVE, "argmax"))
    (tmp_path / "final" / "README.md").unlink()
    with pytest.raises(ValueError, match="README.md is missing"):
        push_to_hub(tmp_path / "final", "me/draft", endpoint=endpoint)
    (tmp_path / "final" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        push_to_hub(tmp_path / "final", "me/draft", endpoint=endpoint)
    assert not kept.files and not kept.repositories


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(target: Target, tmp_path: Path, hub: Any) -> None:
    write_checkpoint(tmp_path / "final", make(target, NATIVE, "argmax"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"me/draft was not published: .*[Cc]onnection refused"):
            push_to_hub(tmp_path / "final", "me/draft", endpoint=endpoint)
