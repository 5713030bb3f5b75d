"""`lilicorr.json`: which target a draft model was trained for and how, and what an evaluation measured of it.

Place in the flow: `store` writes it beside the tensors and reads it back, `card` prints it, `fit` holds the target that
it names against the one that is served. What is printed is checked here, so that a damaged file is an error by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lilicorr.checkpoint import speculator
from lilicorr.checkpoint.description import CONFIG, Description, target_of
from lilicorr.checkpoint.field import object_at, read_json
from lilicorr.provenance import sha256_tree

INFO = "lilicorr.json"
FIGURES = {"tau": "tau", "ci95": "tau_ci95", "speedup": "speedup"}  # of a set: their names here and in an evaluation


def read_info(folder: Path) -> dict[str, Any]:
    """The `target_info` a checkpoint was saved with, and how its blocks are cut."""
    path = Path(folder) / INFO
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return read_json(path)


def block_info(description: Description) -> dict[str, Any]:
    """How the blocks are cut, which stands here too: no tensor of a DFlash checkpoint would show another layout."""
    spec = description.spec
    return {"block_size": spec.block_size, "layout": spec.layout, "drafted_width": spec.num_slots}


def info_of(folder: Path, top: dict[str, Any], description: Description) -> dict[str, Any]:
    """`lilicorr.json` without the block, else what the other trainers' config.json, `top`, says of the same things.

    Raises ValueError that names the field for one of another kind, and for a block that is not the description's.
    """
    path = folder / INFO
    if not path.is_file():
        info = {name: top.get(name) for name in ("bos_token_id", "eos_token_id")}
        info |= {"max_anchors": top["num_anchors"]} if top.get("num_anchors") else {}
        named = speculator.target_name(folder / CONFIG, top) if speculator.TYPE in top else None
        return info if named is None else info | {"target": named}
    info, own = read_info(folder), block_info(description)
    for name, value in object_at(path, info, "block").items():
        if value != own.get(name):
            raise ValueError(f"{folder / CONFIG}: {name} is {own.get(name)}, {INFO} beside it says {value}")
    info.pop("block", None)
    _check_kinds(path, info)
    return info


def _check_kinds(path: Path, info: dict[str, Any]) -> None:
    """Refuse what a card could not print."""
    if not isinstance(info.get("target"), str):
        object_at(path, info, "target")
    source = target_of(info).get("source")
    if not isinstance(source, str | None):
        raise ValueError(f"{path}: field target.source must be a text, got {source!r}")
    thinking = object_at(path, info, "template_kwargs").get("enable_thinking")
    if isinstance(thinking, list | dict):  # else it is what the run's template took, whatever that made of it
        raise ValueError(f"{path}: field template_kwargs.enable_thinking must be true or false, got {thinking!r}")
    corpus = object_at(path, info, "corpus")
    _check_numbers(path, info, "num_blocks", kind=int)
    _check_numbers(path, info, "loss", "tau")
    _check_numbers(path, corpus, "rows", "tokens", kind=int)
    taus = object_at(path, info, "taus")
    for name in taus:
        _check_row(path, object_at(path, taus, name), name)


def _check_numbers(
    path: Path, values: dict[str, Any], *names: str, where: str = "", kind: type[int] | type[float] = float
) -> None:
    """Refuse what is none of the numbers that a measurement or a count can give."""
    for name in names:
        value = values.get(name)
        if value is not None and not _is_number(value, kind):
            wanted = "an integer" if kind is int else "a number"
            raise ValueError(f"{path}: field {name}{where} must be {wanted} of at least 0, got {value!r:.40}")


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    """Whether it is finite and at least 0; a boolean is none, an integer is of either kind."""
    return type(value) in (int, kind) and 0 <= value < sys.float_info.max


def _check_row(path: Path, row: dict[str, Any], where: str) -> None:
    """Refuse figures of a set, named by `where`, that are no numbers."""
    if row.get("tau") is None:
        raise ValueError(f"{path}: field tau of {where} is missing")
    _check_numbers(path, row, "tau", "speedup", "temperature", where=f" of {where}")
    interval = row.get("ci95")
    if interval is not None and not (
        isinstance(interval, list) and len(interval) == 2 and all(_is_number(end, float) for end in interval)
    ):
        raise ValueError(f"{path}: the interval of {where} must be two numbers, got {interval!r}")


def taus_of(results: Path, system: str, folder: Path) -> dict[str, Any]:
    """The acceptance lengths of one system from `results.json` of an evaluation, by set, as `info["taus"]`.

    Results of sampled decoding, of one seed or over several, are taken with their temperature. Raises ValueError for a
    file that is not there or no evaluation's, for a system that was not evaluated, and where the results say which
    checkpoint was measured, for one that is not `folder`.
    """
    if not results.is_file():
        raise ValueError(f"{results} is missing")
    read = read_json(results)
    systems = object_at(results, read, "systems")
    if not systems:
        raise ValueError(f"{results} holds no evaluation: field systems is missing")
    if system not in systems:
        raise ValueError(f"{results} has the systems {', '.join(systems)}, not {system!r}")
    measured = object_at(results, read, "checkpoints").get(system)
    if measured not in (None, sha256_tree(folder)):
        raise ValueError(
            f"{results} is of another checkpoint than {folder}: {system} was measured with the content {measured}"
        )
    temperature, taus = _temperature(results, read), {}
    for name in object_at(results, systems, system):
        values = object_at(results, systems[system], name)
        if "tau" in values and values["tau"] is None:
            continue  # no block was verified
        taus[name] = {key: values.get(theirs) for key, theirs in FIGURES.items()} | {"temperature": temperature}
        _check_row(results, taus[name], f"{system} on {name}")
    return taus


def _temperature(results: Path, read: dict[str, Any]) -> float | None:
    """At which an evaluation decoded, None where it does not say so; figures over seeds are of the sampled ones."""
    config = object_at(results, object_at(results, read, "provenance"), "config")
    return object_at(results, config, "evaluate").get("sampled_temperature" if "seeds" in read else "temperature")
