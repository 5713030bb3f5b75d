"""The package `dflash` of DFlash's authors decodes with our plain drafters, block by block as we do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peers import NUM_PROMPTS, Case, installed, toy_case, trained_case

from lilicorr.checkpoint import read_checkpoint, write_checkpoint
from lilicorr.decode import Decoder, SamplingParams

dflash_model = installed("dflash.model")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CASES: dict[str, Callable[[], Case]] = {
    "random": toy_case,
    "tiny profile": lambda: trained_case("tiny", "dflash"),
    "demo profile": lambda: trained_case("demo", "dflash"),
}


@pytest.mark.parametrize("form", ["zlab", "zlab_old"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_acceptance_lengths_are_equal(
    case: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable
) -> None:
    monkeypatch.setattr(dflash_model, "_cuda_time", time.perf_counter)  # it synchronises a GPU that is not there
    target, model, checkpoint, prompts = CASES[case]()
    write_checkpoint(tmp_path / "export", checkpoint, form)
    theirs = dflash_model.DFlashDraftModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert theirs.block_size == model.spec.block_size and theirs.mask_token_id == model.spec.mask_token_id
    assert tuple(theirs.target_layer_ids) == model.spec.target_layer_ids
    loaded, exported = theirs.state_dict(), read_checkpoint(tmp_path / "export").tensors
    assert all(torch.equal(loaded[name], tensor) for name, tensor in exported.items())

    stop, limit, slots = target.eos_ids, 48, model.spec.num_slots
    params, lengths = SamplingParams(max_new_tokens=limit, stop_ids=stop), []
    assert len(prompts) == NUM_PROMPTS
    for prompt in prompts:
        runs = list(Decoder(target, model).stream(prompt, params))
        # its last blocks are shortened to the tokens that are left, ours are not: it is given one block more
        answer = dflash_model.dflash_generate(
            theirs, target.model, torch.tensor([prompt]), limit + slots + 1, list(stop), return_stats=True
        )
        tokens = [token for run in runs for token in run]
        assert answer.output_ids[0, len(prompt) :].tolist()[:limit] == tokens
        ours = [len(run) for run in runs[1:]]
        ours = ours if tokens[-1] in stop else ours[:-1]  # the last one is cut at the limit
        assert answer.acceptance_lengths[: len(ours)] == ours
        lengths += ours
    record_property("tau", sum(lengths) / len(lengths))
    print(f"\n{case}, {form}: {len(lengths)} blocks, tau {sum(lengths) / len(lengths):.3f}")
    assert max(lengths) > 1
