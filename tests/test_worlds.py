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
from lilicorr.state import newest_checkpoint
from lilicorr.target import Target
from lilicorr.training import Trainer
from test_training import make_set, make_trainer

MakeTarget = Callable[..., Target]
STEPS = 6  # two epochs of five rows in batches of two: the last batch of an epoch is a single row
CLOSE = 1e-9


def part_of_run(
    rank: int,
    world: int,
    folder: Path,
    name: str,
    start: str | None,
    stop: int,
    make_target: MakeTarget,
    changes: dict[str, Any],
) -> None:
    """One rank's steps up to `stop`, from the state `start`; rank 0 leaves its gradients, losses and states."""
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(folder / f"{name}.store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainer = make_trainer(make_target(), TrainingSet.open(folder / "set"), "run", **{"max_grad_norm": 1e9} | changes)
    if start is not None:
        trainer.restore(folder / start)
    steps = []
    while trainer.done < stop:
        metrics = trainer.step(trainer.done)
        steps.append({"gradient": trainer.gradient.clone(), "loss": metrics["loss"], "blocks": metrics["blocks"]})
        trainer.save(folder / f"{name}-{trainer.done}")
    if rank == 0:
        torch.save(steps, folder / f"{name}.pt")
    if world > 1:
        dist.destroy_process_group()


def run_part(
    folder: Path,
    make_target: MakeTarget,
    world: int,
    name: str,
    start: str | None = None,
    stop: int = STEPS,
    **changes: Any,
) -> list[dict[str, Any]]:
    """What `part_of_run` leaves with that many workers and these changes of the config."""
    arguments = (world, folder, name, start, stop, make_target, changes)
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


def find_newest(rank: int, folder: Path) -> None:
    """A rank that finds the states of its own listing; it leaves the name of the one that was chosen."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = [newest_checkpoint(folder / name / str(rank), torch.device("cpu")) for name in ("states", "none")]
    (folder / f"{rank}.txt").write_text(" ".join(state.name if state else "none" for state in found))
    dist.destroy_process_group()


def test_all_ranks_go_on_from_the_state_that_rank_0_finds(tmp_path: Path) -> None:
    """Rank 1 lists an older content of the shared folder, or a newer one."""
    for place in ("states/0/step_4", "states/0/step_10", "states/1/step_4", "none/1/step_2"):
        (tmp_path / place).mkdir(parents=True)
    mp.start_processes(find_newest, args=(tmp_path,), nprocs=2, start_method="fork")
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["step_10 none"] * 2
    assert newest_checkpoint(tmp_path / "states" / "1", torch.device("cpu")) == tmp_path / "states" / "1" / "step_4"


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
