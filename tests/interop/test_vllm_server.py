"""What `serve_app.vllm_backend` calls and names stands in vLLM's own source, which is read and not imported.

Its server needs a GPU and most of its dependencies; neither is here. Names and arguments are what a release changes.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from peers import toy_case

from lilicorr.checkpoint import write_checkpoint
from lilicorr.checkpoint.__main__ import inspect
from lilicorr.checkpoint.format import SPECULATORS

SOURCE = Path(__file__).parents[2] / "serve_app" / "vllm_backend.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The folder of the package."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed: make test-interop")
    return Path(spec.origin).parent


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def fields_of(path: Path, *classes: str) -> set[str]:
    """The annotated fields of classes in a file."""
    found = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef) and node.name in classes]
    assert len(found) == len(classes), f"{path} lacks one of {classes}"
    return {line.target.id for node in found for line in node.body if isinstance(line, ast.AnnAssign)}


def test_the_release_is_the_one_that_is_named(vllm: Path) -> None:
    assert f'RELEASE = "{importlib.metadata.version("vllm")}"' in SOURCE.read_text(encoding="utf-8")


def test_the_functions_are_there_and_take_what_they_are_given(vllm: Path) -> None:
    """All that the backend imports from vLLM, with the numbers of arguments of its calls."""
    calls = {node.func.id: node for node in ast.walk(tree_of(SOURCE)) if isinstance(node, ast.Call) and
             isinstance(node.func, ast.Name)}  # fmt: skip
    imported = [
        (node.module, alias.name)
        for node in ast.walk(tree_of(SOURCE))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    ]
    assert len(imported) == 6
    for module, name in imported:
        path = vllm.joinpath(*module.split(".")[1:]).with_suffix(".py")
        (found,) = (node for node in tree_of(path).body if getattr(node, "name", None) == name)
        if isinstance(found, ast.ClassDef):
            continue
        given = len(calls[name].args)
        assert len(found.args.args) - len(found.args.defaults) <= given <= len(found.args.args), f"{module}.{name}"


def test_the_settings_are_its_own(vllm: Path) -> None:
    engine = fields_of(vllm / "engine" / "arg_utils.py", "EngineArgs")
    frontend = fields_of(vllm / "entrypoints" / "common" / "cli_args.py", "BaseFrontendArgs", "FrontendArgs")
    told = {"model", "revision", "tokenizer_revision", "served_model_name", "dtype", "max_model_len"}
    told |= {"tensor_parallel_size", "distributed_executor_backend", "speculative_config", "max_num_seqs"}
    assert told | {"pipeline_parallel_size", "gpu_memory_utilization"} <= engine
    assert {"default_chat_template_kwargs", "api_key"} <= frontend
    drafting = fields_of(vllm / "config" / "speculative.py", "SpeculativeConfig")
    assert {"method", "model", "num_speculative_tokens"} <= drafting


@pytest.mark.parametrize("head", ["argmax", "dspark"])
def test_its_own_translation_of_speculators_leaves_blocks_as_they_were_trained(
    vllm: Path, tmp_path: Path, head: str
) -> None:
    """It needs no import of vLLM. A false `sliding_window_non_causal` would make every layer of DFlash causal."""
    path = vllm / "transformers_utils" / "configs" / "speculators" / "algos.py"
    spec = importlib.util.spec_from_file_location("algos", path)
    assert spec is not None and spec.loader is not None
    algorithms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algorithms)
    write_checkpoint(tmp_path / "export", toy_case(head)[2], SPECULATORS)
    config = json.loads((tmp_path / "export" / "config.json").read_text(encoding="utf-8"))
    assert "vllm" in inspect(tmp_path / "export")["as it stands for"]

    def translated(fields: dict[str, Any]) -> dict[str, Any]:
        layer = dict(fields["transformer_layer_config"])
        algorithms.SUPPORTED_SPECULATORS_TYPES[fields["speculators_model_type"]](fields, layer)
        return layer

    ours = translated(config)
    assert ours.get("dflash_config", ours)["mask_token_id"] == config["mask_token_id"]
    assert not ours.get("dflash_config", {}).get("causal") and set(ours["layer_types"]) == {"full_attention"}
    if head == "argmax":
        assert translated(config | {"sliding_window_non_causal": False})["dflash_config"]["causal"] is True


def test_the_methods_and_architectures_are_known(vllm: Path) -> None:
    speculative = (vllm / "config" / "speculative.py").read_text(encoding="utf-8")
    registry = (vllm / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    drafters = (vllm / "v1" / "worker" / "gpu" / "spec_decode" / "__init__.py").read_text(encoding="utf-8")
    assert 'Literal["dflash"]' in speculative and 'Literal["dspark"]' in speculative
    for architecture in ("DFlashDraftModel", "LiLiCorrDraftModel", "Qwen3DSparkModel"):
        assert f'"{architecture}"' in registry
    assert 'if "LiLiCorrDraftModel" in architectures' in drafters
