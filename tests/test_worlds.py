"""However many workers carry a run, and whenever their number changes: the same gradients, losses and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lilicorr.corpus import TrainingSet
from lilicorr.target import Target
from lilicorr.training import Trainer
from test_training import make_set, make_trainer

MakeTarget = Callable[..., Target]
STEPS = 6  # two epochs of five rows in batches of two: the last batch of an epoch is a single row
CLOSE = 1e-9


def part_of_run(
    rank: int, world: int, folder: Path, name: str, start: str | None, stop: int, make_target: MakeTarget
) -> None:
    """One rank's steps up to `stop`, from the state `start`; rank 0 leaves the gradients, losses and states."""
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(folder / f"{name}.store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainer = make_trainer(make_target(), TrainingSet.open(folder / "set"), "run", max_grad_norm=1e9)
    if start is not None:
        trainer.restore(folder / start)
    steps = []
    while trainer.done < stop:
        metrics = trainer.step(trainer.done)
        steps.append({"gradient": trainer.gradient.clone(), "loss": metrics["loss"], "blocks": metrics["blocks"]})
        if rank == 0:
            trainer.save(folder / f"{name}-{trainer.done}")
    if rank == 0:
        torch.save(steps, folder / f"{name}.pt")
    if world > 1:
        dist.destroy_process_group()


def run_part(
    folder: Path, make_target: MakeTarget, world: int, name: str, start: str | None = None, stop: int = STEPS
) -> list[dict[str, Any]]:
    """What `part_of_run` leaves with that many workers."""
    arguments = (world, folder, name, start, stop, make_target)
    if world == 1:
        part_of_run(0, *arguments)
    else:
        mp.start_processes(part_of_run, args=arguments, nprocs=world, start_method="fork")
    return torch.load(folder / f"{name}.pt")


def assert_same(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(found, expected)):
        assert one["blocks"] == other["blocks"] > 0
        assert one["loss"] == pytest.approx(other["loss"], abs=CLOSE), step
        assert (one["gradient"] - other["gradient"]).abs().max() < CLOSE, step
        assert other["gradient"].norm() > 0.01


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], MakeTarget]:
    """The folder, steps and target of a run that one worker carried from its beginning to its end."""
    from random_target import make_target

    folder = tmp_path_factory.mktemp("worlds")
    make_set(folder)
    return folder, run_part(folder, make_target, 1, "alone"), make_target


@pytest.mark.parametrize("world", [2, 3])
def test_the_loss_curve_and_every_gradient_are_those_of_one_worker(run: Any, world: int) -> None:
    folder, expected, make_target = run
    assert_same(run_part(folder, make_target, world, f"together{world}"), expected)


@pytest.mark.parametrize("done", [3, 4], ids=["an epoch's end", "an epoch's middle"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_run_goes_on_from_any_step_with_any_number_of_workers(run: Any, done: int, world: int) -> None:
    folder, expected, make_target = run
    found = run_part(folder, make_target, world, f"resumed{done}{world}", start=f"alone-{done}")
    assert_same(found, expected[done:])
    if world == 1:  # the same additions in the same order
        assert all(torch.equal(one["gradient"], other["gradient"]) for one, other in zip(found, expected[done:]))


def test_workers_may_come_and_go(run: Any) -> None:
    """Two workers, then three, then one: the global batch stays, and so does everything else."""
    folder, expected, make_target = run
    found = run_part(folder, make_target, 2, "first", stop=2)
    found += run_part(folder, make_target, 3, "second", "first-2", stop=4)
    found += run_part(folder, make_target, 1, "third", "second-4")
    assert_same(found, expected)


def test_a_step_reduces_twice_however_many_micro_batches_it_has(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the counts, once the gradient: no gradient is reduced before the last micro-batch has added to it."""
    folder, _, make_target = run
    reduced: list[int] = []
    monkeypatch.setattr(Trainer, "_sum", lambda self, tensor: reduced.append(tensor.numel()) or tensor)
    for micro_batch_size in (1, 4):
        trainer = make_trainer(
            make_target(), TrainingSet.open(folder / "set"), batch_size=5, micro_batch_size=micro_batch_size
        )
        trainer.step(0)
        assert len(reduced) == 2 and reduced[1] == trainer.gradient.numel() > reduced[0]
        reduced.clear()
