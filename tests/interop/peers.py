"""What the tests against other projects' code decode: a random target with a lively drafter, and the demo's own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from toys import random_prompts, toy_draft_model, toy_target

from lilicorr.chat import render_prompt
from lilicorr.checkpoint import Checkpoint, load_draft_model, read_checkpoint
from lilicorr.checkpoint.description import describe_model
from lilicorr.checkpoint.store import checkpoint_tensors
from lilicorr.config import TargetConfig
from lilicorr.draft_model import DraftModel
from lilicorr.prompts import read_conversations
from lilicorr.target import Target, load_target

RUNS = Path(os.environ.get("LILICORR_RUNS", Path(__file__).parents[2] / "runs"))
NUM_PROMPTS = 32

Case = tuple[Target, DraftModel, Checkpoint, list[list[int]]]


def installed(package: str) -> ModuleType:
    """A package of other people's, or a skipped test where it is not installed; what it lacks is an error."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed: make test-interop", allow_module_level=True)
    return importlib.import_module(package)


def toy_case(head: str = "argmax", num_candidates: int = 3) -> Case:
    """Twelve tokens, so that an untrained drafter is right now and then."""
    target = toy_target(hidden=64, head_dim=16, num_layers=4)
    model = toy_draft_model(target, head, block_size=6, num_candidates=num_candidates)
    tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    tables = {"embed_tokens.weight": target.embed.clone(), "lm_head.weight": target.lm_head.clone()}
    info = {"target": {"source": "a/target", "architectures": ["Qwen3ForCausalLM"]}}
    checkpoint = Checkpoint(describe_model(model, "float32"), tensors, tables, None, info)
    return target, model, checkpoint, random_prompts(NUM_PROMPTS, longest=150)


def trained_case(profile: str, run: str) -> Case:
    """The draft model of a finished run, and prompts: those held out from it, and as many others as are missing."""
    folder = RUNS / profile
    final = folder / "train" / run / "final"
    if not final.is_dir():
        pytest.skip(f"{final} does not exist: train the profile {profile} first, or set LILICORR_RUNS")
    source = json.loads((folder / "prepare" / "target.json").read_text())["source"]
    layers = read_checkpoint(final).description.spec.target_layer_ids
    target = load_target(TargetConfig(source), layer_ids=layers)
    model = load_draft_model(final, target, dtype=torch.float32)
    files = [folder / "prepare" / name for name in ("held_out.parquet", "prompts.parquet")]
    conversations = [conversation for file in files for conversation in read_conversations(file)]
    first = [conversation.messages[:1] for conversation in conversations[:NUM_PROMPTS]]
    prompts = [render_prompt(target.tokenizer, messages, {"enable_thinking": False}) for messages in first]
    return target, model, read_checkpoint(final, target), prompts
