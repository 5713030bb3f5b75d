"""Values that users give a config: files and texts in YAML, limits of numbers, names that nobody knows.

Place in the flow: `lilicorr.config` asks here; everything else has the finished dataclasses.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml


def at_least(config: Any, low: float, *names: str) -> None:
    """Raise ValueError for a number of a config dataclass, alone or in a tuple, below `low` or NaN; None passes."""
    for name in names:
        value = getattr(config, name)
        if not all(number >= low for number in (value if isinstance(value, tuple) else (value,)) if number is not None):
            null = " or null" if type(config).__dataclass_fields__[name].default is None else ""
            raise ValueError(f"{name} must be at least {low:g}{null}, got {value}")


def above(config: Any, low: float, *names: str) -> None:
    """Raise ValueError for a number of a config dataclass that is not above `low`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > low:
            raise ValueError(f"{name} must be above {low:g}, got {value}")


def finite(config: Any, *names: str) -> None:
    """Raise ValueError for a number of a config dataclass that is infinite or NaN; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def at_most(config: Any, name: str, other: str) -> None:
    """Raise ValueError for a number of a config dataclass above another one of it; None passes."""
    value, most = getattr(config, name), getattr(config, other)
    if value is not None and value > most:
        raise ValueError(f"{name} must be at most {other}, {most:g}, got {value}")


def one_of(config: Any, choices: Sequence[Any], name: str) -> None:
    """Raise ValueError for a value of a config dataclass that is none of the choices; None is called null."""
    if getattr(config, name) not in choices:
        known = ", ".join("null" if choice is None else str(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {known}, got {getattr(config, name)!r}")


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; ValueError in one line where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise ValueError(f"{where} is not YAML: {error.problem} in {place}") from error


def unknown_key(key: Any, known: Iterable[str], where: str) -> str:
    """What to say of a key below `where` that is none of the `known` ones."""
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return f"unknown key {where}{key}; did you mean {where}{near[0]}?"


def set_value(values: dict[str, Any], override: str) -> None:
    """Set in nested values what `a.b=value` says, the value in YAML; ValueError where it says nothing of the kind."""
    path, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"an override has the form a.b=value, got {override!r}")
    node, keys = values, path.split(".")
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ValueError(f"{path}: {key} is not a section")
    node[keys[-1]] = parse_yaml(text, override)


def read_profile(name: str, folder: Path) -> dict[str, Any]:
    """The values of a profile of `folder`, or of a YAML file by its path, and as `profile` what it is called.

    Raises ValueError if there is no such profile, and for a file that is no mapping.
    """
    own = name.endswith((".yaml", ".yml"))
    path = Path(name) if own else folder / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(_unknown_profile(path, folder, own))
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping, got {values!r:.60}")
    return {"profile": path.stem, **values}


def _unknown_profile(path: Path, folder: Path, own: bool) -> str:
    """What to say where the profile `path` is missing: names of `folder`, and of files beside it that resemble it."""
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    beside = {str(p): p.stem for end in ("yaml", "yml") for p in path.parent.glob(f"*.{end}")} if own else {}
    near = difflib.get_close_matches(path.stem, [*known, *beside.values()], n=3)
    names = [*(name for name in known if name in near), *(file for file, stem in beside.items() if stem in near)]
    guess = f"; did you mean {' or '.join(names)}?" if names else ""
    missing = f"no profile file {path}" if own else f"no profile {path.stem!r} in {folder}"
    return f"{missing}{guess} (known profiles: {', '.join(known)})"
