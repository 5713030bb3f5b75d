"""The regeneration stage: what it refuses, what it leaves, and that killed drivers and actors change nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import fake_generator
import test_shards
from fake_generator import ReplayGenerator, conversations, hashed_answer, slow_answer
from lilicorr.config import PipelineConfig, RegenerateConfig
from lilicorr.generator import Completion, DialogueSettings, regenerate_conversations
from lilicorr.prompts import write_conversations
from lilicorr.provenance import write_json
from lilicorr.tiny import byte_tokenizer
from pipelines import inputs, regenerate, shards, stage
from pipelines.errors import one_line_errors
from pipelines.shard_queue import ShardQueue
from pipelines.tally import Progress, Tally

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = RegenerateConfig(
    engine="transformers", max_new_tokens=12, shard_size=4, num_actors=2, gpus_per_actor=0.0, max_attempts=2
)


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    """22 prompts in six shards, and a target that only its description knows."""
    made = PipelineConfig(profile="test", run_dir=str(tmp_path), regenerate=SETTINGS)
    write_conversations(made.directory / "prepare" / "prompts.parquet", conversations(22))
    write_json(made.directory / "prepare" / "target.json", {"template_hash": "t", "files_hash": "f"})
    return made


def change(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return replace(config, regenerate=replace(config.regenerate, **changes))


def make_replay(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
    return byte_tokenizer(), ReplayGenerator()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make shards in this process instead of on Ray; their ids in order."""
    made: list[str] = []

    def run_on_ray(work: regenerate.Work) -> None:
        work.attempts.mkdir(parents=True)
        regenerate.GeneratorActor(work, ShardQueue(len(work.shards))).work_off(0)
        made.extend(shard.id for shard in work.shards)

    monkeypatch.setattr(regenerate, "run_on_ray", run_on_ray)
    return made


def folder_of(config: PipelineConfig) -> Path:
    return config.directory / "regenerate"


def expected(config: PipelineConfig) -> dict[str, list[list[int]]]:
    """Prompt and answer ids of every turn, as an unkilled run leaves them."""
    tokenizer, generator = make_replay(config)
    settings = DialogueSettings(config.target.template_kwargs, config.regenerate.max_new_tokens)
    results = regenerate_conversations(conversations(22), tokenizer, generator, settings)
    return {r.conversation.cid: [[*t.prompt_ids, *t.completion_ids] for t in r.turns] for r in results}


def found(config: PipelineConfig) -> dict[str, list[list[int]]]:
    """The same of what a run has left."""
    everything = test_shards.content(folder_of(config))
    return {cid: [[*t["prompt_ids"], *t["completion_ids"]] for t in turns] for cid, turns in everything.items()}


def test_a_run_and_a_second_one(config: PipelineConfig, in_process: list[str]) -> None:
    numbers = regenerate.run(config, make_replay)
    assert found(config) == expected(config)
    assert len(in_process) == 6 and numbers["ok"] == numbers["planned"] == 22
    assert sorted(path.name for path in folder_of(config).iterdir()) == [
        "_run.json",
        "dead_letter",
        "manifest",
        "plan.json",
        "shards",
        "summary.json",
    ]
    before = {path: path.read_bytes() for path in folder_of(config).rglob("*.parquet")}
    assert regenerate.run(config, make_replay) == numbers and len(in_process) == 6
    assert {path: path.read_bytes() for path in folder_of(config).rglob("*.parquet")} == before


def test_settings_that_change_the_tokens_are_refused_and_others_are_not(
    config: PipelineConfig, in_process: list[str]
) -> None:
    regenerate.run(config, make_replay)
    regenerate.run(change(config, num_actors=7, max_attempts=9, batch_size=3, cpus_per_actor=0.5), make_replay)
    with pytest.raises(ValueError, match=r"regenerate\.max_new_tokens: 12 -> 13.*--force"):
        regenerate.run(change(config, max_new_tokens=13), make_replay)
    thinking = replace(config, target=replace(config.target, template_kwargs={"enable_thinking": True}))
    with pytest.raises(ValueError, match="template_kwargs"):
        regenerate.run(thinking, make_replay)
    write_json(config.directory / "prepare" / "target.json", {"template_hash": "t", "files_hash": "g"})
    with pytest.raises(ValueError, match=r"target: .*'f'.* -> .*'g'"):
        regenerate.run(config, make_replay)
    with pytest.raises(ValueError, match=r"regenerate\.engine must be one of transformers, vllm, got 'sglang'"):
        regenerate.run(change(config, engine="sglang"), make_replay)


def test_shards_of_another_version_are_not_gone_on_with(
    config: PipelineConfig, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    regenerate.run(config, make_replay)
    monkeypatch.setitem(stage.VERSIONS, "regenerate", 99)
    with pytest.raises(ValueError, match=r"version: \d+ -> 99.*--force"):
        regenerate.run(config, make_replay)
    assert found(config) == expected(config)


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inputs.ENGINES, "vllm", ("no-such-package",))
    message = r"vllm needs the package no-such-package: pip install -e '.\[gpu\]'; without a GPU: --set"
    with pytest.raises(ValueError, match=message):
        inputs.engine_label("vllm")


GIVEN_UP = conversations(22)[8:12]  # the third shard


class Dying(ReplayGenerator):
    """Fails at every prompt of one shard."""

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        text = bytes(i for i in prompt_ids if i < 256)
        if any(c.messages[0]["content"].encode() in text for c in GIVEN_UP):
            raise MemoryError("out of memory")
        super().submit(key, prompt_ids, max_new_tokens)


def make_dying(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
    return byte_tokenizer(), Dying()


def test_an_engine_that_dies_is_left_and_its_shard_given_up(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []

    def die(code: int) -> None:
        exits.append(code)
        raise SystemExit(code)

    def run_on_ray(work: regenerate.Work) -> None:
        work.attempts.mkdir(parents=True)
        queue = ShardQueue(len(work.shards))
        while queue.waiting or queue.held:
            with contextlib.suppress(SystemExit):
                regenerate.GeneratorActor(work, queue).work_off(0)

    monkeypatch.setattr(os, "_exit", die)
    monkeypatch.setattr(regenerate, "run_on_ray", run_on_ray)
    with pytest.raises(RuntimeError, match=r"4 conversations are dead, 18\.18 % .* 0\.10 %.*EngineDied.*dead_letter"):
        regenerate.run(config, make_dying)
    assert exits == [1] * 5
    content = test_shards.content(folder_of(config))
    dead = {cid: letter for cid, letter in content.items() if isinstance(letter, tuple)}
    assert {letter[:2] for letter in dead.values()} == {("EngineDied", "5 attempts: MemoryError: out of memory")}
    assert content.keys() == expected(config).keys() and len(dead) == 4
    manifests = {path: path.read_bytes() for path in (folder_of(config) / "manifest").iterdir()}
    numbers = regenerate.run(change(config, max_dead_fraction=0.2), make_dying)
    assert numbers["ok"] + numbers["dead"] == 22 and numbers["dead_by_error"] == {"EngineDied": 4}
    assert exits == [1] * 10  # a new driver tries the shard again, as often as any other
    changed = [path for path, before in manifests.items() if path.read_bytes() != before]
    assert len(changed) == 1
    numbers = regenerate.run(config, make_replay)
    assert numbers["ok"] == numbers["planned"] == 22 and found(config) == expected(config)
    assert not list((folder_of(config) / "dead_letter").iterdir())
    assert [path for path, before in manifests.items() if path.read_bytes() != before] == changed


def test_dead_letters_of_other_reasons_stay(config: PipelineConfig, in_process: list[str]) -> None:
    def make_narrow(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
        return byte_tokenizer(), ReplayGenerator(max_model_len=10)

    numbers = regenerate.run(change(config, max_dead_fraction=1.0), make_narrow)
    assert numbers["dead_by_error"] == {"PromptTooLong": 22} and len(in_process) == 6
    assert regenerate.run(change(config, max_dead_fraction=1.0), make_replay) == numbers and len(in_process) == 6


def test_errors_of_our_own_are_not_blamed_on_the_engine(
    config: PipelineConfig, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(shards, "read_shard", broken)
    with pytest.raises(KeyError, match="a bug"):
        regenerate.run(config, make_replay)


def test_the_progress_line_and_the_status(
    config: PipelineConfig, in_process: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = config.directory / "prepare" / "prompts.parquet"
    plan = shards.open_plan(folder_of(config), prompts, 4)
    run = shards.open_run(folder_of(config), "replay 1", {})
    progress = Progress(run, plan)
    assert progress.line(Tally(run.folder, plan).summary(), 1.0).endswith("time left unknown")
    numbers = {**Tally(run.folder, plan).summary(), "completion_tokens": 800, "ok": 10, "dead": 1, "shards_done": 3}
    line = progress.line(numbers, 40.0)
    assert "shards 3/6, 11 conversations (1 dead), 20 tokens/s" in line
    assert line.endswith("time left 40.0 s")  # 11 of 22 conversations made of 800 tokens in 40 s
    monkeypatch.setattr(stage, "resolve_config", lambda arguments: config)
    regenerate.main(["--status"])
    assert "shards 0/6" in capsys.readouterr().out and in_process == []
    monkeypatch.setattr(stage, "resolve_config", lambda arguments: replace(config, profile="other"))
    with pytest.raises(SystemExit, match="no regeneration run"):
        regenerate.main(["--status"])


def test_the_driver_and_the_status_need_no_torch() -> None:
    code = "import sys, pipelines.regenerate, pipelines.tally; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def by_value(ray_cluster: None) -> Iterator[None]:
    """Let workers have what is defined in the tests, whose folder they do not know."""
    import ray

    modules = (sys.modules[__name__], fake_generator)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> Any:
    """The value of `condition` once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"still waiting after {seconds} s")


class Traced(ReplayGenerator):
    """Leaves its process id in a folder; waits, or is killed, where the folder says so.

    The first process that meets question 7 is killed. Question 9 is answered only when shards of others are done.
    """

    def __init__(self, folder: Path, others: int) -> None:
        super().__init__(answer=self.reply)
        self.folder, self.others = folder, others
        (folder / f"pid-{os.getpid()}").touch()

    def reply(self, prompt_ids: list[int], max_new_tokens: int) -> Completion:
        text = bytes(i for i in prompt_ids if i < 256)
        if b"question 7.0" in text and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if b"question 9.0" in text:
            manifests = self.folder.parent / "regenerate" / "manifest"
            wait_for(lambda: len(list(manifests.glob("*.json"))) >= self.others)
            (self.folder / "slow").touch()
        return hashed_answer(prompt_ids, max_new_tokens)


@pytest.mark.ray
def test_a_killed_actor_costs_its_open_shard_and_a_slow_row_nobody_else(config: PipelineConfig, by_value: None) -> None:
    trace = config.directory / "trace"
    trace.mkdir()
    killed = next(c.cid for c in conversations(22) if c.messages[0]["content"] == "question 7.0")

    def make_traced(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
        return byte_tokenizer(), Traced(trace, others=2)  # the actor that waits has up to three of the six shards open

    numbers = regenerate.run(config, make_traced)
    assert found(config) == expected(config) and numbers["ok"] == 22
    assert (trace / "killed").exists() and (trace / "slow").exists()
    plan = shards.read_plan(folder_of(config))
    retried = [shards.read_manifest(folder_of(config), s)["attempt"] for s in plan.shards]
    assert retried[[shard.id <= killed for shard in plan.shards].count(True) - 1] >= 2
    processes = len(list(trace.glob("pid-*")))
    assert processes in (2, 3)  # two actors, one of them twice unless the other has made all before it is back
    assert regenerate.run(config, make_traced) == numbers
    assert len(list(trace.glob("pid-*"))) == processes  # nothing to do: no actor was started


@pytest.mark.ray
def test_an_engine_that_hangs_is_not_waited_for(config: PipelineConfig, by_value: None) -> None:
    pid = config.directory / "pid"

    def hang_once(prompt_ids: list[int], max_new_tokens: int) -> Completion:
        if b"question 9.0" in bytes(i for i in prompt_ids if i < 256) and not pid.exists():
            pid.write_text(str(os.getpid()))
            time.sleep(10_000)
        return hashed_answer(prompt_ids, max_new_tokens)

    numbers = regenerate.run(config, lambda _: (byte_tokenizer(), ReplayGenerator(hang_once)))
    assert found(config) == expected(config) and numbers["ok"] == 22
    process = Path("/proc") / pid.read_text()
    wait_for(lambda: not process.exists())  # its place is free for the next stage


@pytest.mark.ray
def test_a_foreseen_error_in_an_actor_ends_in_one_line(config: PipelineConfig, by_value: None) -> None:
    def refuse(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
        inputs.engine_label("sglang")
        return make_replay(config)

    def refuse_later(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
        Path(config.directory / "prepare" / "prompts.parquet").unlink(missing_ok=True)
        return make_replay(config)

    with (
        pytest.raises(SystemExit, match="^error: regenerate.engine must be one of .*, got 'sglang'$"),
        one_line_errors(),
    ):
        regenerate.run(config, refuse)
    missing = r"^error: .*prompts\.parquet.*No such file or directory$"  # as Arrow words it
    with pytest.raises(SystemExit, match=missing), one_line_errors():
        regenerate.run(config, refuse_later)


DRIVER = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "ray")!r}]
import ray
import fake_generator, test_regenerate
from pipelines import regenerate
for module in (fake_generator, test_regenerate):
    ray.cloudpickle.register_pickle_by_value(module)
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={{"env_vars": {{"PYTHONPATH": {str(ROOT)!r}}}}})
config = test_regenerate.PipelineConfig(profile="test", run_dir=sys.argv[2], regenerate=test_regenerate.SETTINGS)
regenerate.run(config, test_regenerate.make_two)
"""


def make_slow(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
    return byte_tokenizer(), ReplayGenerator(answer=slow_answer)


def make_two(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
    """A generator that answers until two shards are done, in a process that leaves its id."""
    (config.directory / f"pid-{os.getpid()}").touch()

    def until_two_are_done(prompt_ids: list[int], max_new_tokens: int) -> Completion:
        while len(list((folder_of(config) / "manifest").glob("*.json"))) >= 2:
            time.sleep(0.05)
        return hashed_answer(prompt_ids, max_new_tokens)

    return byte_tokenizer(), ReplayGenerator(answer=until_two_are_done)


@pytest.mark.ray
def test_a_killed_driver_is_continued(config: PipelineConfig, by_value: None) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address, config.run_dir], cwd="/", start_new_session=True)
    manifests = folder_of(config) / "manifest"
    try:
        wait_for(lambda: len(list(manifests.glob("*.json"))) >= 2)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    actors = [Path("/proc") / path.name.removeprefix("pid-") for path in config.directory.glob("pid-*")]
    wait_for(lambda: not any(actor.exists() for actor in actors))  # one may still finish a write
    before = {path: path.read_bytes() for path in manifests.iterdir() if path.suffix == ".json"}
    assert 2 <= len(before) < 6
    numbers = regenerate.run(config, make_replay)
    assert found(config) == expected(config) and numbers["ok"] == 22
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.ray
def test_too_few_resources_are_an_error_at_once(config: PipelineConfig, ray_cluster: None) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"3 actors of 1 GPU each need 3 GPU, the cluster has 0; .*gpus_per_actor"):
        regenerate.run(change(config, num_actors=3, gpus_per_actor=1.0), make_replay)
    with pytest.raises(ValueError, match=r"6 actors of 3 CPU each need 18 CPU, the cluster has 4"):
        regenerate.run(change(config, num_actors=100, cpus_per_actor=3.0), make_replay)
    assert time.monotonic() - start < 20
    assert not list((folder_of(config) / "manifest").iterdir())
