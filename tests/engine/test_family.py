"""Every family of targets end to end: trained for, saved, read, decoded by the reference and by the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import answer_of, random_prompts, requests_of, run_all, toy_engine

from lilicorr.blocks import DraftOutput, LossTerm, Proposal, Verdict
from lilicorr.checkpoint import load_draft_model, read_checkpoint, save_draft_model, write_checkpoint
from lilicorr.config import RunConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.lattice import Lattice, build_lattice
from lilicorr.tiny import NUM_ROWS, byte_tokenizer
from lilicorr.training import Trainer, start_drafter
from random_target import make_target
from test_training import CONFIG, RUN, make_model, make_set

NUM_IDS = 259  # of the tokenizer; the five rows behind them pad the target's tables


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_family_end_to_end(family: str, tied: bool, tmp_path: Path) -> None:
    target = make_target(family, dtype=torch.float32, vocab=NUM_ROWS, tied=tied)
    target.tokenizer = byte_tokenizer()
    assert (target.embed.data_ptr() == target.lm_head.data_ptr()) == tied
    model = make_model(target)
    trainer = Trainer(target, make_set(tmp_path), replace(CONFIG, drafter_lr=1e-3), replace(RUN, steps=3), model)
    before = model.drafter.fc.weight.detach().clone()
    assert all(0 < trainer.step(step)["loss"] < math.inf for step in range(3))
    assert not torch.equal(model.drafter.fc.weight, before)
    save_draft_model(tmp_path / "final", model, {}, "float32")
    loaded = load_draft_model(tmp_path / "final", target)
    # padding rows that the drafter would choose: its own copy of the output table, the target's stays as it is
    loaded.draft_rows = loaded.draft_rows.clone()
    loaded.draft_rows[NUM_IDS:] *= 20
    wanted, proposed = [], []

    def observe(draft: DraftOutput | None, proposal: Proposal, _verdict: Verdict) -> None:
        wanted.append(draft.logits.argmax(dim=-1))
        proposed.append(proposal.token_ids)

    prompts, params = random_prompts(4, longest=150, vocab=200), SamplingParams(max_new_tokens=20)
    expected = [Decoder(target, None).generate(prompt, params).token_ids for prompt in prompts]
    decoder = Decoder(target, loaded)
    assert [decoder.generate(prompt, params, observe).token_ids for prompt in prompts] == expected
    assert (torch.cat(wanted) >= NUM_IDS).any() and (torch.cat(proposed) < NUM_IDS).all()
    chunks = run_all(toy_engine(target, loaded), requests_of(prompts, lambda _: params))
    assert [answer_of(chunks[str(index)]) for index in range(4)] == expected


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False)])
def test_a_published_drafter_trains_on_and_padding_is_no_candidate(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm start from a plain drafter in its authors' format, for targets that are not Qwen3."""
    target = make_target(family, dtype=torch.float32, vocab=NUM_ROWS, tied=tied)
    target.tokenizer = byte_tokenizer()
    published, model = make_model(target, "argmax"), make_model(target)
    torch.nn.init.normal_(published.drafter.fc.weight)
    save_draft_model(tmp_path / "own", published, {}, "float32")
    write_checkpoint(tmp_path / "zlab", read_checkpoint(tmp_path / "own"), "zlab")
    start_drafter(model, tmp_path / "zlab", target)
    assert torch.equal(model.drafter.fc.weight, published.drafter.fc.weight)
    model.draft_rows = model.draft_rows.clone()
    model.draft_rows[NUM_IDS:] *= 20
    wanted, chosen, loss = [], [], model.head.loss

    def recorded_loss(draft: DraftOutput, *rest: Any) -> dict[str, LossTerm]:
        wanted.append(draft.logits.argmax(dim=-1))
        return loss(draft, *rest)

    def recorded_lattice(token_ids: torch.Tensor, log_probs: torch.Tensor) -> Lattice:
        chosen.append(token_ids)
        return build_lattice(token_ids, log_probs)

    model.head.loss = recorded_loss
    monkeypatch.setattr("lilicorr.heads.lilicorr.build_lattice", recorded_lattice)
    assert 0 < Trainer(target, make_set(tmp_path), CONFIG, RUN, model).step(0)["loss"] < math.inf
    assert not torch.equal(model.drafter.fc.weight, published.drafter.fc.weight)
    assert (torch.cat(wanted) >= NUM_IDS).any() and (torch.cat(chosen) < NUM_IDS).all()


def test_the_plain_head_in_the_engine_leaves_padding_alone(tmp_path: Path) -> None:
    target = make_target(dtype=torch.float32, vocab=NUM_ROWS)
    target.tokenizer = byte_tokenizer()
    model = make_model(target, "argmax")
    assert model.num_ids == NUM_IDS and RunConfig(head="argmax").head == model.head_name
    model.draft_rows = model.draft_rows.clone()
    model.draft_rows[NUM_IDS:] *= 20
    engine, seen = toy_engine(target, model), []
    propose = model.head.propose

    def recorded(draft: DraftOutput, sampling: object = None) -> Proposal:
        proposal = propose(draft, sampling)
        seen.append((draft.logits.argmax(dim=-1), proposal.token_ids))
        return proposal

    model.head.propose = recorded
    run_all(engine, requests_of(random_prompts(3, vocab=200), lambda _: SamplingParams(max_new_tokens=12)))
    assert any((best >= NUM_IDS).any() for best, _ in seen) and all((ids < NUM_IDS).all() for _, ids in seen)
