"""FSDP2 spreads the drafter's layers over workers and changes nothing else: losses, states, who may go on from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lilicorr.corpus import TrainingSet
from lilicorr.sharding import check_sharding
from lilicorr.state import STATE
from lilicorr.target import Target
from lilicorr.training import Trainer
from random_target import make_target
from test_training import make_set, make_trainer
from test_worlds import CLOSE, run_part

STOP = 4
# Five rows a step: two workers have two and three micro-batches, three have one or two. The gradient is clipped.
CONFIG: dict[str, Any] = {"batch_size": 5, "micro_batch_size": 1, "max_grad_norm": 0.1}
SHARDED = CONFIG | {"sharding": "fsdp2"}


def state(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / name / STATE)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype == torch.float64 and (found[name] - tensor).abs().max() < CLOSE, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder and the steps of a run that one worker carried, with a state behind every step."""
    folder = tmp_path_factory.mktemp("sharding")
    make_set(folder)
    return folder, run_part(folder, make_target, 1, "alone", stop=STOP, **CONFIG)


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def recompute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether micro-batches are done again in the backward pass, as on a GPU, where layers are then gathered again."""
    original = Trainer.__init__

    def init(self: Trainer, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self.recompute = request.param

    monkeypatch.setattr(Trainer, "__init__", init)
    return request.param


def test_two_sharded_workers_have_the_losses_and_states_of_one(alone: Any, recompute: bool) -> None:
    folder, expected = alone
    name = f"two{recompute}"
    steps = run_part(folder, make_target, 2, name, stop=STOP, **SHARDED)
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], abs=CLOSE)
    assert [step["blocks"] for step in steps] == [step["blocks"] for step in expected]
    start, end = state(folder, "alone-1"), state(folder, f"alone-{STOP}")
    assert_close(state(folder, f"{name}-{STOP}"), end)
    moved = "weight.drafter.layers.0.mlp.down_proj.weight"
    assert (end[moved] - start[moved]).abs().max() > 1e-4


def test_any_number_of_workers_goes_on_from_any_state_sharded_or_not(alone: Any) -> None:
    """From one worker to two sharded ones, to three, of which layers are cut unevenly, and back to one."""
    folder, expected = alone
    steps = run_part(folder, make_target, 2, "second", "alone-1", stop=2, **SHARDED)
    steps += run_part(folder, make_target, 3, "third", "second-2", stop=3, **SHARDED)
    steps += run_part(folder, make_target, 1, "fourth", "third-3", stop=STOP, **CONFIG)
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected[1:]], abs=CLOSE)
    assert_close(state(folder, f"fourth-{STOP}"), state(folder, f"alone-{STOP}"))


def test_resuming_sharded_workers_is_bit_equal(alone: Any) -> None:
    folder, _ = alone
    whole = run_part(folder, make_target, 2, "whole", stop=3, **SHARDED)
    resumed = run_part(folder, make_target, 2, "resumed", "whole-2", stop=3, **SHARDED)
    assert resumed[0]["loss"] == whole[2]["loss"]
    found, expected = state(folder, "resumed-3"), state(folder, "whole-3")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def look_inside(rank: int, folder: Path, factory: Callable[..., Target]) -> None:
    """One of two ranks: leave what it holds, how often each shard is reduced in a step, and the whole model."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "inside.store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    target = factory(dtype=torch.float32)
    trainer = make_trainer(target, TrainingSet.open(folder / "set"), **SHARDED)
    reduced: Counter[str] = Counter()
    for name, parameter in trainer.parameters.items():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reduced.update([name]))
    trainer.step(0)
    model = trainer.whole_model()
    trainer.save(folder / "inside")
    found = {
        "reduced": reduced,
        "sharded": {name for name, own in trainer.own.items() if own is not trainer.parameters[name]},
        "held": {name: own.numel() for name, own in trainer.own.items()},
        "whole": {name: parameter.numel() for name, parameter in trainer.parameters.items()},
        "dtypes": {tensor.dtype for own in trainer.own.values() for tensor in (own, own.grad)},
        "target": all(type(parameter) is torch.nn.Parameter for parameter in target.model.parameters()),
        "model": None if model is None else model.state_dict(),
        "tables": model is None or model.lm_head is trainer.draft_model.lm_head,
    }
    torch.save(found, folder / f"inside-{rank}.pt")
    dist.destroy_process_group()


def test_layers_are_held_in_part_in_fp32_and_reduced_once_a_step(alone: Any) -> None:
    folder, _ = alone
    mp.start_processes(look_inside, args=(folder, make_target), nprocs=2, start_method="fork")
    ranks = [torch.load(folder / f"inside-{rank}.pt", weights_only=False) for rank in range(2)]
    weights = {
        name.removeprefix("weight."): t for name, t in state(folder, "inside").items() if name.startswith("weight.")
    }
    for found in ranks:
        assert found["sharded"] == {name for name in found["whole"] if name.startswith("drafter.layers.")}
        assert found["reduced"] == Counter(found["sharded"]) and found["dtypes"] == {torch.float32}
        assert found["target"] and found["tables"]
    for name, size in ranks[0]["whole"].items():
        held = [found["held"][name] for found in ranks]
        assert sum(held) == size if name in ranks[0]["sharded"] else held == [size, size], name
    assert ranks[1]["model"] is None and ranks[0]["model"].keys() == weights.keys()
    assert all(torch.equal(ranks[0]["model"][name], tensor) for name, tensor in weights.items())


def test_what_cannot_be_sharded_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="train.sharding must be one of none, fsdp2, got 'zero'"):
        check_sharding("zero", 2)
    with pytest.raises(ValueError, match="train.sharding fsdp2 spreads layers over at least 2 workers, there is 1"):
        make_trainer(tiny_target, make_set(tmp_path), sharding="fsdp2")
