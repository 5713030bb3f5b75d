"""Training is a pure function of its config: of step, resume, micro-batches and ranks; and it makes drafts accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fake_shards import turn, write_shard
from lilicorr import training
from lilicorr.anchors import choose_anchors
from lilicorr.blocks import TrainBatch
from lilicorr.checkpoint import read_checkpoint, save_draft_model, write_checkpoint
from lilicorr.config import DrafterConfig, RunConfig, TrainConfig, YarnConfig, fingerprint
from lilicorr.corpus import Sampler, TrainingSet, build_training_set
from lilicorr.deal import deal_rows, row_costs
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.state import checkpoint_folder, checkpoints, prune_checkpoints
from lilicorr.target import Target
from lilicorr.training import (
    PACE,
    Trainer,
    lr_factor,
    num_steps,
    run_fingerprint,
    start_drafter,
)

MakeTarget = Callable[..., Target]
DRAFTER = DrafterConfig(num_layers=2, block_size=5, num_candidates=4)
HEAD = {"hidden_size": 16, "num_heads": 2, "factor_dim": 16, "margin_blend": 0.5, "ramp_fraction": 0.5}
CONFIG = TrainConfig(drafter=DRAFTER, precision="float32", batch_size=2, max_anchors=6, chunk_blocks=64, max_length=30)
RUN = RunConfig(head="lilicorr", steps=6, warmup_fraction=0.3)


def make_set(folder: Path, lengths: tuple[int, ...] = (9, 24, 13, 40, 6)) -> TrainingSet:
    """Rows of random tokens: a prompt of three and an answer that brings each row to its length."""
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(5)).tolist()
    turns = [turn(f"c{i}", 0, ids[i : i + 3], ids[i + 3 : i + length]) for i, length in enumerate(lengths)]
    build_training_set([write_shard(folder / "shard.parquet", turns)], folder / "set", CONFIG.max_length, "turn")
    return TrainingSet.open(folder / "set")


def make_model(target: Target, head: str = "lilicorr", **config: Any) -> DraftModel:
    torch.manual_seed(3)
    shape = drafter_shape(DRAFTER, target.config)
    spec = block_spec(DRAFTER, target.config, target.mask_token_id)
    head_config = HEAD | config if head == "lilicorr" else {}
    return build_draft_model(shape, spec, head, head_config, target).to(target.embed.dtype)


def make_trainer(target: Target, training_set: TrainingSet, identity: str = "", **changes: Any) -> Trainer:
    config = replace(CONFIG, **changes)
    return Trainer(target, training_set, config, RUN, make_model(target), identity)


def train(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    return [trainer.step(step) for step in steps]


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key not in ("seconds", "blocks_per_s")}


def gradient_after(target: Target, training_set: TrainingSet, **changes: Any) -> torch.Tensor:
    """The unclipped global gradient of the first step."""
    trainer = make_trainer(target, training_set, max_grad_norm=1e9, **changes)
    trainer.step(0)
    return trainer.gradient


def test_resume_is_bit_equal(tmp_path: Path, target_factory: MakeTarget) -> None:
    target = target_factory(dtype=torch.float32)
    training_set = make_set(tmp_path)
    whole = make_trainer(target, training_set, "run")
    expected = train(whole, range(6))
    first = make_trainer(target, training_set, "run")
    train(first, range(4))
    first.save(tmp_path / "step_4")
    second = make_trainer(target, training_set, "run")
    second.restore(tmp_path / "step_4")
    metrics = train(second, range(4, 6))
    assert [without_time(m) for m in metrics] == [without_time(m) for m in expected[4:]]
    for name, parameter in whole.parameters.items():
        assert torch.equal(second.parameters[name], parameter), name
        for moment, value in whole.optimizer.state[parameter].items():
            assert torch.equal(second.optimizer.state[second.parameters[name]][moment], value), (name, moment)
    assert second.num_blocks == whole.num_blocks == sum(m["blocks"] for m in expected)
    assert not torch.equal(first.parameters["drafter.fc.weight"], whole.parameters["drafter.fc.weight"])


def test_a_state_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    training_set = make_set(tmp_path)
    trainer = make_trainer(tiny_target, training_set, "one")
    trainer.save(tmp_path / "step_0")
    with pytest.raises(ValueError, match="saved by run one, this is two"):
        make_trainer(tiny_target, training_set, "two").restore(tmp_path / "step_0")
    plain = Trainer(tiny_target, training_set, CONFIG, RUN, make_model(tiny_target, "argmax"), "one")
    with pytest.raises(ValueError, match="tensor exp_avg.head.anchor_norm.weight is surplus"):
        plain.restore(tmp_path / "step_0")
    path = tmp_path / "step_0" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="state.safetensors is missing or damaged"):
        trainer.restore(tmp_path / "step_0")
    with pytest.raises(ValueError, match="the next step is 0, got 1"):
        trainer.step(1)


def test_micro_batches_and_chunks_and_recomputation_change_nothing(tmp_path: Path, tiny_target: Target) -> None:
    training_set = make_set(tmp_path)
    expected = gradient_after(tiny_target, training_set, batch_size=5, micro_batch_size=5)
    assert expected.norm() > 0.1
    for changes in ({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_size": 5, "chunk_blocks": 3}):
        gradient = gradient_after(tiny_target, training_set, batch_size=5, **changes)
        assert (gradient - expected).abs().max() < 1e-12, changes
    trainer = make_trainer(tiny_target, training_set, max_grad_norm=1e9, batch_size=5, micro_batch_size=2)
    trainer.recompute = True
    trainer.step(0)
    assert (trainer.gradient - expected).abs().max() < 1e-12


def rank_gradients(rank: int, folder: Path, batch_sizes: tuple[int, ...], make_target: MakeTarget) -> None:
    """One of two ranks: leave its gradient and metrics for every batch size."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    target, training_set = make_target(), TrainingSet.open(folder / "set")
    for size in batch_sizes:
        trainer = make_trainer(target, training_set, max_grad_norm=1e9, batch_size=size)
        metrics = trainer.step(0)
        torch.save({"gradient": trainer.gradient, "metrics": metrics}, folder / f"rank{rank}_{size}.pt")
    dist.destroy_process_group()


def test_ranks_change_nothing(tmp_path: Path, tiny_target: Target, target_factory: MakeTarget) -> None:
    """Two ranks with a row each, three rows on two ranks, and a rank without a row: the gradient of one process."""
    training_set, sizes = make_set(tmp_path), (2, 3, 1)
    mp.start_processes(rank_gradients, args=(tmp_path, sizes, target_factory), nprocs=2, start_method="fork")
    for size in sizes:
        trainer = make_trainer(tiny_target, training_set, max_grad_norm=1e9, batch_size=size)
        metrics = trainer.step(0)
        for rank in range(2):
            found = torch.load(tmp_path / f"rank{rank}_{size}.pt")
            assert (found["gradient"] - trainer.gradient).abs().max() < 1e-12
            assert without_time(found["metrics"]) == pytest.approx(without_time(metrics), abs=1e-9)
            assert found["metrics"]["blocks"] == metrics["blocks"] > 0


def test_rows_are_dealt_by_their_costs(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    training_set = make_set(tmp_path)
    trainer = make_trainer(tiny_target, training_set)
    dealt: list[tuple[list[int], list[int]]] = []

    def deal(rows: list[int], costs: list[int], *more: int, **how: bool) -> Iterator[tuple[list[int], bool]]:
        dealt.append((rows, costs))
        return deal_rows(rows, costs, *more, **how)

    monkeypatch.setattr(training, "deal_rows", deal)
    trainer.step(0)
    ((rows, costs),) = dealt
    assert costs == row_costs(training_set, rows, trainer.config.max_anchors) and len(set(costs)) > 1
    assert costs != [int(training_set.lengths[row]) for row in rows]


def test_start_from_takes_the_drafter_and_nothing_else(tmp_path: Path, target_factory: MakeTarget) -> None:
    target = target_factory(dtype=torch.float32)
    source = make_model(target, "argmax")
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter)
    save_draft_model(tmp_path / "final", source, {}, "float32")
    draft_model = make_model(target)
    head = {name: tensor.clone() for name, tensor in draft_model.head.state_dict().items()}
    start_drafter(draft_model, tmp_path / "final", target)
    for name, tensor in source.drafter.state_dict().items():
        assert torch.equal(draft_model.drafter.state_dict()[name], tensor), name
    for name, tensor in head.items():
        assert torch.equal(draft_model.head.state_dict()[name], tensor), name
    shape = drafter_shape(replace(DRAFTER, intermediate_size=48), target.config)
    other = build_draft_model(shape, source.spec, "argmax", {}, target)
    with pytest.raises(ValueError, match="its intermediate_size is 64, this run's is 48"):
        start_drafter(other, tmp_path / "final", target)


@pytest.mark.parametrize("form", ["zlab_old", "modelopt", "speculators"])
def test_a_published_drafter_is_a_warm_start(tmp_path: Path, target_factory: MakeTarget, form: str) -> None:
    """Any format, without our own notes, with YaRN for serving: LiLiCorr trains on from its drafter."""
    target = target_factory(dtype=torch.float32)
    source = make_model(target, "argmax")
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_draft_model(tmp_path / "own", source, {"num_blocks": 7}, "float32")
    checkpoint = read_checkpoint(tmp_path / "own")
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=64)
    description = replace(checkpoint.description, shape=replace(checkpoint.description.shape, yarn=yarn))
    write_checkpoint(tmp_path / form, replace(checkpoint, description=description), form)
    draft_model = make_model(target)
    assert start_drafter(draft_model, tmp_path / form, target) == 7
    (tmp_path / form / "lilicorr.json").unlink()
    assert start_drafter(draft_model, tmp_path / form, target) == 0
    for name, tensor in source.drafter.state_dict().items():
        assert torch.equal(draft_model.drafter.state_dict()[name], tensor), name
    assert draft_model.drafter.layers[0].self_attn.rotary.scale == 1.0
    trainer = Trainer(target, make_set(tmp_path), CONFIG, RUN, draft_model)
    assert trainer.step(0)["loss"] > 0
    assert not torch.equal(draft_model.drafter.fc.weight, source.drafter.fc.weight)
    wider = build_draft_model(source.shape, replace(source.spec, block_size=6), "argmax", {}, target)
    with pytest.raises(ValueError, match="its block_size is 5, this run's is 6"):
        start_drafter(wider, tmp_path / form, target)


def test_the_blocks_of_the_run_before_count_too(tmp_path: Path, tiny_target: Target) -> None:
    trainer = Trainer(tiny_target, make_set(tmp_path), CONFIG, RUN, make_model(tiny_target), "", num_blocks=100)
    metrics = trainer.step(0)
    assert metrics["num_blocks"] == trainer.num_blocks == 100 + metrics["blocks"]
    trainer.save(tmp_path / "step_1")
    assert json.loads((tmp_path / "step_1" / "meta.json").read_text())["num_blocks"] == trainer.num_blocks


def seen_by(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, steps: range) -> list[tuple[list[int], list[int]]]:
    """Rows and anchors that the trainer draws, by step."""
    seen: list[tuple[list[int], list[int]]] = []

    def record(batch: TrainBatch, *key: int) -> tuple[torch.Tensor, torch.Tensor]:
        anchors, keep = choose_anchors(batch, *key)
        seen.append((batch.sample_ids.tolist(), anchors[keep].tolist()))
        return anchors, keep

    with monkeypatch.context() as patch:
        patch.setattr(training, "choose_anchors", record)
        train(trainer, steps)
    return seen


def test_a_branch_goes_on_behind_the_rows_of_its_trunk(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trunk and branch draw what one long run draws, over the end of an epoch of three steps and after a resume."""
    training_set = make_set(tmp_path)
    settings = (tiny_target, training_set, replace(CONFIG, max_anchors=3, micro_batch_size=2), RUN)

    def branch() -> Trainer:
        return Trainer(*settings, make_model(tiny_target), "branch", first_step=2)

    expected = seen_by(Trainer(*settings, make_model(tiny_target)), monkeypatch, range(6))
    assert expected[0] != expected[3]
    whole = branch()
    assert seen_by(whole, monkeypatch, range(4)) == expected[2:]
    first, second = branch(), branch()
    train(first, range(3))
    first.save(tmp_path / "step_3")
    second.restore(tmp_path / "step_3")
    assert seen_by(second, monkeypatch, range(3, 4)) == expected[5:]
    for name, parameter in whole.parameters.items():
        assert torch.equal(second.parameters[name], parameter), name


def test_the_schedule() -> None:
    factors = [lr_factor(step, 104, "cosine", 4 / 104) for step in range(104)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0
    assert factors[54] == pytest.approx(0.5) and factors[29] == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert 0 < factors[103] < 3e-4 and lr_factor(104, 104, "cosine", 4 / 104) == 0.0
    assert [lr_factor(step, 10, "constant", 0.2) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert lr_factor(0, 10, "cosine", 0.0) == 1.0


def test_two_groups_follow_the_schedule_and_the_ramp_follows_progress(tmp_path: Path, tiny_target: Target) -> None:
    trainer = make_trainer(tiny_target, make_set(tmp_path), drafter_lr=1e-2, head_lr=1e-3, head_weight_decay=0.5)
    metrics = train(trainer, range(3))
    drafter, head = trainer.optimizer.param_groups
    assert (drafter["weight_decay"], head["weight_decay"]) == (0.0, 0.5)
    assert [m["drafter_lr"] for m in metrics] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert [m["head_lr"] for m in metrics] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert head["lr"] == pytest.approx(1e-3)
    for m, ramp in zip(metrics, (0.0, 1 / 3, 2 / 3)):
        head_part = 0.125 * m["head_ce"] + 0.25 * m["distractor"] + 0.125 * m["margin"]
        assert m["loss"] == pytest.approx(m["drafter_ce"] + ramp * head_part)


def test_the_gradient_is_clipped_as_a_whole(tmp_path: Path, tiny_target: Target) -> None:
    trainer = make_trainer(tiny_target, make_set(tmp_path), max_grad_norm=0.01)
    assert trainer.step(0)["grad_norm"] > 0.01
    assert trainer.gradient.norm() == pytest.approx(0.01, rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights(tmp_path: Path, tiny_target: Target) -> None:
    trainer = make_trainer(tiny_target, make_set(tmp_path))
    trainer.draft_model.drafter.norm.weight.data[0] = float("nan")
    before = trainer.parameters["drafter.fc.weight"].clone()
    with pytest.raises(FloatingPointError, match="step 0: the gradient's norm is nan"):
        trainer.step(0)
    assert torch.equal(trainer.parameters["drafter.fc.weight"], before) and trainer.done == 0


def test_autocast_keeps_fp32_parameters_and_moments(tmp_path: Path, target_factory: MakeTarget) -> None:
    target = target_factory(dtype=torch.bfloat16)
    model = make_model(target).float()
    trainer = Trainer(target, make_set(tmp_path), replace(CONFIG, precision="bfloat16"), RUN, model)
    before = trainer.parameters["drafter.layers.0.self_attn.q_norm.weight"].clone()
    metrics = train(trainer, range(2))
    assert all(math.isfinite(m["loss"]) for m in metrics)
    tensors = [*trainer.parameters.values(), *(s["exp_avg"] for s in trainer.optimizer.state.values())]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    moved = trainer.parameters["drafter.layers.0.self_attn.q_norm.weight"] - before
    assert (moved != 0).all()
    with pytest.raises(ValueError, match="parameters must be float32"):
        Trainer(target, make_set(tmp_path), CONFIG, RUN, make_model(target))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (RunConfig(), "exactly one of epochs and steps, got epochs=None and steps=None"),
        (RunConfig(epochs=1.0, steps=5), "exactly one of epochs and steps, got epochs=1.0 and steps=5"),
        (RunConfig(steps=0), "must be positive, got epochs=None and steps=0"),
        (RunConfig(steps=5, schedule="linear"), "schedule must be one of cosine, constant, got 'linear'"),
        (RunConfig(steps=5, warmup_fraction=1.0), "warmup_fraction must be at least 0 and below 1, got 1.0"),
    ],
)
def test_a_run_that_cannot_be_is_refused(run: RunConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_steps(run, Sampler(10, 2, 0))


def test_epochs_and_precision(tmp_path: Path, tiny_target: Target) -> None:
    assert num_steps(RunConfig(epochs=1.5), Sampler(10, 2, 0)) == 8
    with pytest.raises(ValueError, match="precision must be one of bfloat16, float32, got 'fp8'"):
        make_trainer(tiny_target, make_set(tmp_path), precision="fp8")


def test_the_fingerprint_ignores_how_a_run_is_carried_out(tmp_path: Path) -> None:
    training_set = make_set(tmp_path)
    same = replace(CONFIG, micro_batch_size=4, num_workers=8, log_steps=1, trackers=("wandb",), cache_features=True)
    same = replace(same, attention="sdpa", sharding="fsdp2", min_workers=4)
    identity = run_fingerprint(CONFIG, RUN, training_set, "target")
    assert run_fingerprint(same, RUN, training_set, "target") == identity
    before = {key: value for key, value in asdict(RUN).items() if not key.startswith("block_")}
    trained = {key: value for key, value in asdict(CONFIG).items() if key not in PACE}
    del trained["drafter"]["target_layer_ids"]
    assert identity == fingerprint(trained, before, training_set.meta["content"], "target")
    other_layers = replace(DRAFTER, target_layer_ids=(1, 2))
    others = [
        run_fingerprint(CONFIG, replace(RUN, block_size=4), training_set, "target"),
        run_fingerprint(replace(CONFIG, head_lr=1.0), RUN, training_set, "target"),
        run_fingerprint(replace(CONFIG, drafter=other_layers), RUN, training_set, "target"),
        run_fingerprint(CONFIG, replace(RUN, steps=7), training_set, "target"),
        run_fingerprint(CONFIG, RUN, training_set, "other"),
        run_fingerprint(CONFIG, RUN, make_set(tmp_path / "other", (9, 9)), "target"),
    ]
    assert len({identity, *others}) == 7


def test_checkpoints_are_found_in_order_and_pruned(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        checkpoint_folder(tmp_path, step).mkdir()
    (tmp_path / "step_200.tmp-abc").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step_9", "step_20", "step_100"]
    prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_100", "step_20"]


@pytest.mark.parametrize("restricted", [False, True])
def test_an_overfitted_draft_model_is_accepted(tmp_path: Path, target_factory: MakeTarget, restricted: bool) -> None:
    """The whole path: greedy answers of the target, training on them, decoding, nearly full blocks."""
    target = target_factory(dtype=torch.float32)
    prompts = [[i + 1, 2 * i + 3, 40 - i, 7] for i in range(2)]
    params = SamplingParams(max_new_tokens=26)
    answers = [Decoder(target, None).generate(prompt, params).token_ids for prompt in prompts]
    turns = [turn(f"c{i}", 0, prompt, answer) for i, (prompt, answer) in enumerate(zip(prompts, answers))]
    build_training_set([write_shard(tmp_path / "a.parquet", turns)], tmp_path / "set", 64, "turn")
    training_set = TrainingSet.open(tmp_path / "set")
    config = TrainConfig(
        drafter=DRAFTER, batch_size=3, micro_batch_size=3, precision="float32", drafter_lr=6e-3, head_lr=6e-3,
    )  # fmt: skip
    vocab_ids = training_set.vocab_ids() if restricted else None
    spec = block_spec(DRAFTER, target.config, target.mask_token_id)
    torch.manual_seed(0)
    head = {"hidden_size": 16, "num_heads": 2, "factor_dim": 16}
    shape = drafter_shape(DRAFTER, target.config)
    draft_model = build_draft_model(shape, spec, "lilicorr", head, target, vocab_ids)
    run = RunConfig(steps=70)
    trainer = Trainer(target, training_set, config, run, draft_model, feature_file=tmp_path / "features")
    metrics = train(trainer, range(70))
    assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"]
    assert metrics[-1]["selected_prefix"] > 0.8 * spec.num_slots
    decoded = [Decoder(target, draft_model.eval()).generate(prompt, params) for prompt in prompts]
    assert [result.token_ids for result in decoded] == answers
    tau = sum(result.num_block_tokens for result in decoded) / sum(result.num_blocks for result in decoded)
    assert tau > 0.8 * spec.block_size
