"""A method is one class and one line in `HEADS`: a head of this file is trained, saved, loaded, evaluated, served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from lilicorr.blocks import BlockLabels, BlockSpec, DraftOutput, LossTerm, Proposal
from lilicorr.checkpoint import load_draft_model, save_draft_model
from lilicorr.checkpoint.__main__ import inspect
from lilicorr.checkpoint.card import CARD
from lilicorr.config import EngineConfig, RunConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.heads import HEADS
from lilicorr.heads.base import Head, HeadFormat, label_index
from lilicorr.lattice import log_probs_at
from lilicorr.losses import block_cross_entropy
from lilicorr.target import Target
from lilicorr.training import Trainer
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.replica import Replica
from serve_app.served_model import served_model
from test_evaluate import ask, run
from test_training import CONFIG, make_model, make_set


@dataclass(frozen=True)
class ToyConfig:
    """What a head may be configured by."""

    scale: float = 1.0
    decay: float = 4.0


class ToyHead(Head):
    """The argmax of the drafter's logits plus one learned vector."""

    Config = ToyConfig
    format = HeadFormat(
        "ToyDraftModel",
        prefix="toy.",
        tensors=("toy.",),
        config_fields={"toy_scale": "scale"},
        candidates_field="toy_topk",
    )

    def __init__(self, config: ToyConfig, shape: Any, spec: BlockSpec) -> None:
        super().__init__(config, shape, spec)
        self.bias = torch.nn.Parameter(torch.zeros(shape.vocab_size))

    def propose(self, draft: DraftOutput, sampling: Any = None) -> Proposal:
        return Proposal((draft.logits + self.config.scale * self.bias).argmax(dim=-1))

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        index, valid = label_index(draft, labels)
        log_probs = log_probs_at(draft.logits + self.config.scale * self.bias, index[..., None])[..., 0]
        return {"ce": block_cross_entropy(log_probs, valid, self.config.decay)}


def test_a_head_takes_one_class_and_one_line(
    tmp_path: Path, target_factory: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HEADS, "toy", ToyHead)
    target = target_factory(dtype=torch.float32, num_layers=6, vocab=264)
    from lilicorr.tiny import byte_tokenizer

    target.tokenizer = byte_tokenizer()
    model = make_model(target, "toy")
    trainer = Trainer(target, make_set(tmp_path), CONFIG, RunConfig(head="toy", steps=5), model)
    losses = [trainer.step(step)["loss"] for step in range(5)]
    assert losses[-1] < losses[0] and model.head.bias.abs().max() > 0
    assert [group["base"] for group in trainer.optimizer.param_groups] == [CONFIG.drafter_lr, CONFIG.head_lr]

    save_draft_model(tmp_path / "final", model, {}, "float32")
    loaded = load_draft_model(tmp_path / "final", target)
    assert loaded.head_name == "toy" and torch.equal(loaded.head.bias, model.head.bias)
    assert inspect(tmp_path / "final")["candidates"] == loaded.spec.num_candidates == 4
    assert "| candidates | 4 |" in (tmp_path / "final" / CARD).read_text()
    with pytest.raises(ValueError, match="head_config.scale = 2.0, but it was trained with 1.0"):
        load_draft_model(tmp_path / "final", target, head_config={"scale": 2.0})
    prompt = [3, 14, 15]
    expected = Decoder(target, None).generate(prompt, SamplingParams(12)).token_ids
    assert Decoder(target, loaded).generate(prompt, SamplingParams(12)).token_ids == expected
    plain = load_draft_model(tmp_path / "final", target, head="argmax")
    results = run(target, {"chat": [ask("a", "one")]}, draft_models={"dflash": plain, "toy": loaded})
    assert results["systems"]["toy"]["chat"]["matches_autoregressive"] == 1
    assert results["systems"]["toy"]["chat"]["drafted_width"] == 4
    assert served_ids(target, loaded, prompt, 12) == expected


def served_ids(target: Target, draft_model: DraftModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The token ids that the endpoint answers with, over HTTP."""
    engine = Engine(target, draft_model, EngineConfig(max_running=2, num_pages=8))
    replica = Replica(engine, max_requests=2, stall_s=60.0)
    api = build_api(served_model(AppArgs(checkpoint="toy"), engine), replica)
    body = {"model": "lilicorr", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with TestClient(api) as client:
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    replica.close()
    assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0  # there were drafts
    return answer["choices"][0]["token_ids"]
