"""The demo's job: paths in full, the run directory left out of the upload, and a command line that a shell keeps."""

from __future__ import annotations

import shlex
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipelines import full, job, local
from pipelines.stage import resolve_config

OTHER = "a 'b' $HOME; `c`"


def test_relative_paths_are_made_absolute_and_others_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "target: {source: ./model}\nprompts: {source: x.jsonl}\n"
        "train: {runs: {a: {start_from: ./start, steps: 1}, b: {start_from: a, steps: 1}}}\n"
        "evaluate: {sets: [held_out, math500=sub/m.jsonl, mbpp=/data/m.jsonl]}\n"
    )
    arguments = ["--profile", "mine.yaml", "--set", "prompts.data_dir=it's here"]
    options = job.absolute_paths(arguments)
    monkeypatch.chdir("/")
    config = resolve_config(full.parse([*arguments, *options])[0])
    assert config.target.source == f"{tmp_path}/model"
    assert (config.prompts.source, config.prompts.data_dir) == (f"{tmp_path}/x.jsonl", f"{tmp_path}/it's here")
    assert {name: run.start_from for name, run in config.train.runs.items()} == {"a": f"{tmp_path}/start", "b": "a"}
    assert config.evaluate.sets == ("held_out", f"math500={tmp_path}/sub/m.jsonl", "mbpp=/data/m.jsonl")
    assert job.absolute_paths([*arguments, *options]) == options[:2]
    assert job.absolute_paths(["--profile", "tiny"]) == []


def test_a_run_directory_in_the_checkout_is_not_uploaded(tmp_path: Path) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    assert job.excluded_run_directory(tmp_path) == []
    for name in ("out", "deep/er out", "a[b]*!"):
        excluded = packaging._get_excludes(job.ROOT, job.excluded_run_directory(job.ROOT / name))
        assert excluded(job.ROOT / name / ".ray" / "token") and excluded(job.ROOT / name / "demo" / "x")
        assert not excluded(job.ROOT / "lilicorr" / Path(name).name / "x")
    for above in (job.ROOT, job.ROOT.parent):
        with pytest.raises(ValueError, match="outputs cannot go to .*, it holds the code"):
            job.excluded_run_directory(above)


def test_the_job_gets_the_arguments_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Client:
        def __init__(self, dashboard: str) -> None:
            given["dashboard"] = dashboard

        def submit_job(self, **values: Any) -> None:
            given.update(values)

    async def follow(*_: str) -> str:
        return "SUCCEEDED"

    head = {"address": "127.0.0.1:1", "dashboard": "http://127.0.0.1:2", "serve_port": 20_001}
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.job_submission", types.SimpleNamespace(JobSubmissionClient=Client))
    monkeypatch.setattr(local, "start", lambda _: head)
    monkeypatch.setattr(local, "environment", lambda _: {})
    monkeypatch.setattr(job, "follow", follow)
    arguments = ["--profile", "tiny", "--set", f"deploy.model_name={OTHER}", "--run-dir", str(job.ROOT / "out")]
    assert job.demo(job.ROOT / "out" / ".ray", arguments) == 0
    words = shlex.split(given["entrypoint"])
    assert words[1:] == ["pipelines/full.py", "--set", "deploy.port=20001", *arguments]
    config = resolve_config(full.parse(words[2:])[0])
    assert (config.deploy.model_name, config.deploy.port) == (OTHER, 20_001)
    assert "/out" in given["runtime_env"]["excludes"] and given["runtime_env"]["working_dir"] == str(job.ROOT)
    assert not (job.ROOT / "out").exists()


def test_what_is_uploaded_is_the_code_and_the_embedded_target(tmp_path: Path) -> None:
    """Ray takes 512 MiB at most, and every node fetches it: environments, outputs and history stay here."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    packaging.create_package(str(job.ROOT), tmp_path / "code.zip", include_gitignore=True, excludes=list(job.EXCLUDED))
    with zipfile.ZipFile(tmp_path / "code.zip") as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist()}
    assert not [name for name in sizes if name.split("/")[0] in {".venv", "runs", ".git"} or "__pycache__" in name]
    weights = sizes.pop("lilicorr/embedded/model.safetensors")
    assert sizes["pipelines/full.py"] > 0 and sum(sizes.values()) < 5e6 and weights < 10e6
