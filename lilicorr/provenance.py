"""How a result was made, written beside it; and the atomic writes that every stage commits with.

Place in the flow: evaluation, benches and the stage markers put `provenance(config)` into their JSON.
`write_atomic` is the one way a small file becomes visible: whole, or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "ray", "vllm", "triton")
CHUNK_BYTES = 1 << 20
COMMIT_VARIABLE = "LILICORR_COMMIT"  # "<commit>" or "<commit>+dirty": for a copy of the code without its repository


def provenance(config: Any = None, **extra: Any) -> dict[str, Any]:
    """Command, commit, versions, machine and date of this process, ready for JSON.

    `config` is a config dataclass or a plain value, None leaves the key out; `extra` entries are added.
    """
    commit, dirty = source_version(Path(__file__).resolve().parents[1])
    record: dict[str, Any] = {
        "command": command_line(),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": package_versions(),
        "machine": machine(),
    }
    if config is not None:
        record["config"] = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config
    return {**record, **extra}


def command_line() -> str:
    """The command that started this process, without paths of this machine in front of its arguments.

    A module is `python -m name`; a script of the checkout stands relative to it, any other one by its file name.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:  # sys.argv[0] is then the module's file
        return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])
    script, root = sys.argv[0], Path(__file__).resolve().parents[1]
    if os.path.isfile(script):
        path = Path(script).resolve()
        script = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    return shlex.join(["python", script, *sys.argv[1:]])


def source_version(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout at `folder` and whether tracked files differ from it.

    Where `folder` is no checkout (an installed wheel, the copy a Ray job runs in) the environment variable
    `LILICORR_COMMIT` answers; without it both are None.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")  # of another repository where this one is installed in it
    commit = _git(folder, "rev-parse", "HEAD") if top and Path(top) == folder.resolve() else None
    if commit:
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    stated = os.environ.get(COMMIT_VARIABLE)
    if not stated:
        return None, None
    commit, _, mark = stated.partition("+")
    return commit, mark == "dirty"


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command, None where git is missing or `folder` is in no repository."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a number, without importing them; missing ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB; accelerators where torch is already loaded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    record: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        record["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return record


def _cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_atomic(path: Path | str, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)  # as folder.ASIDE
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path | str, data: Any) -> None:
    """Write `data` as indented JSON, atomically; NaN and infinity are refused with ValueError."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def sha256_file(path: Path | str) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_tree(folder: Path | str) -> str:
    """Hex digest of a folder: relative names and contents of its visible files, sorted.

    Raises ValueError if `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"not a folder: {folder}")
    digest = hashlib.sha256()
    for path in sorted(visible_files(folder)):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def visible_files(folder: Path) -> list[Path]:
    """All files below `folder` with no hidden part in their relative path, and none that Python has cached."""

    def hidden(part: str) -> bool:
        return part.startswith(".") or part == "__pycache__"

    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if not any(hidden(part) for part in path.relative_to(folder).parts)]
