"""The library `speculators` reads the configs that we write for it, and its models take the tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peers import Case, installed, toy_case, trained_case
from safetensors.torch import load_file

from lilicorr.checkpoint import read_checkpoint, write_checkpoint
from lilicorr.checkpoint.format import SPECULATORS
from lilicorr.config import BUILT_IN

speculators = installed("speculators")
pytestmark = pytest.mark.slow

TAKEN_FROM_THE_TARGET = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


CASES: dict[str, Callable[[str], Case]] = {
    "random": toy_case,
    "demo profile": lambda head: trained_case("demo", RUNS_OF[head]),
}
RUNS_OF = {"argmax": "dflash", "dspark": "dspark"}


@pytest.mark.parametrize("head", RUNS_OF)
@pytest.mark.parametrize("case", CASES)
def test_it_reads_what_we_write(case: str, head: str, tmp_path: Path) -> None:
    target, model, checkpoint, _ = CASES[case](head)
    write_checkpoint(tmp_path / "export", checkpoint, SPECULATORS)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "export")
    kind, spec, layer = ("dspark" if head == "dspark" else "dflash"), model.spec, config.transformer_layer_config
    assert config.speculators_model_type == kind and config.speculators_config.algorithm == kind
    assert config.block_size == spec.block_size and config.mask_token_id == spec.mask_token_id
    assert [layer_id - 1 for layer_id in config.aux_hidden_state_layer_ids] == list(spec.target_layer_ids)
    assert config.sample_from_anchor == (head == "dspark")
    assert config.speculators_config.proposal_methods[0].speculative_tokens == spec.num_slots
    verifier = checkpoint.info["target"]["source"]  # a name that only this library knows is left out
    assert config.speculators_config.verifier.name_or_path == (None if verifier in BUILT_IN else verifier)
    shape = model.shape
    sizes = (layer.hidden_size, layer.num_hidden_layers, layer.head_dim)
    assert sizes == (shape.hidden_size, shape.num_layers, shape.head_dim)
    assert layer.rope_parameters["rope_theta"] == shape.rope_theta and config.draft_vocab_size == shape.vocab_size

    classes = {"argmax": speculators.DFlashDraftModel, "dspark": speculators.DSparkDraftModel}
    theirs = classes[head](config=config)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    missing, surplus = theirs.load_state_dict(tensors, strict=False)
    assert not surplus and set(missing) <= TAKEN_FROM_THE_TARGET
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in tensors.items())
    print(f"\n{case}, {head}: {len(tensors)} tensors taken, {len(missing)} left to the target")


@pytest.mark.parametrize("head", RUNS_OF)
@pytest.mark.parametrize("case", CASES)
def test_we_read_what_it_writes(case: str, head: str, tmp_path: Path) -> None:
    """Its own files leave out defaults, and say nothing of the number of layers of the target."""
    target, _, checkpoint, _ = CASES[case](head)
    write_checkpoint(tmp_path / "export", checkpoint, SPECULATORS)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "export")
    classes = {"argmax": speculators.DFlashDraftModel, "dspark": speculators.DSparkDraftModel}
    theirs = classes[head](config=config)
    theirs.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"), strict=False)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read_checkpoint(tmp_path / "theirs", target)
    assert found.description.shape == checkpoint.description.shape and found.description.head == head
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())


def test_what_it_cannot_say_is_not_written(tmp_path: Path) -> None:
    """The drafter of the tiny profile reads its target's last layer, which the format has no number for."""
    _, _, checkpoint, _ = trained_case("tiny", "dflash")
    with pytest.raises(ValueError, match="speculators cannot say that layer 1, the target's last, is captured"):
        write_checkpoint(tmp_path / "export", checkpoint, SPECULATORS)
