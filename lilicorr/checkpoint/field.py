"""The fields of a draft model's `config.json`, read strictly.

Place in the flow: `description` reads every field of a checkpoint through `Fields`; whatever is missing, unknown, of
the wrong type or contradicts itself is an error that names the file and the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lilicorr.config import YarnConfig, from_dict


class Fields:
    """The fields of a config.json; what is missing or contradicts itself is an error that names it.

    `top` are the outer fields, of which `dflash_config` holds those of block and head; `path` is for messages.
    """

    def __init__(self, path: Path, top: dict[str, Any]) -> None:
        self.path, self.top = path, top
        self.block = self.object("dflash_config")

    def get(self, name: str, kind: type = int) -> Any:
        """A field of `dflash_config`, else of the top level."""
        places = [place[name] for place in (self.block, self.top) if place.get(name) is not None]
        if not places:
            raise ValueError(f"{self.path}: field {name} is missing")
        if any(value != places[0] for value in places[1:]):
            raise ValueError(f"{self.path}: field {name} is {places[0]!r} in dflash_config and {places[1]!r} outside")
        allowed = (int, float) if kind is float else kind
        if not isinstance(places[0], allowed) or isinstance(places[0], bool) != (kind is bool):
            raise ValueError(f"{self.path}: field {name} must be {kind.__name__}, got {places[0]!r}")
        return places[0]

    def positive(self, name: str, kind: type = int) -> Any:
        """A number above 0."""
        value = self.get(name, kind)
        if not 0 < value < math.inf:
            raise ValueError(f"{self.path}: field {name} must be above 0, got {value}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """A field of the top level that holds fields itself, empty where there is none."""
        return object_at(self.path, self.top, name)

    def integers(self, name: str) -> list[int]:
        """A field that is a list of integers."""
        values = self.get(name, list)
        if not all(type(value) is int for value in values):
            raise ValueError(f"{self.path}: {name} must be integers, got {values}")
        return values

    def has(self, name: str) -> bool:
        """Whether the field stands anywhere."""
        return any(place.get(name) is not None for place in (self.block, self.top))

    def expect(self, name: str, value: Any, owner: str) -> None:
        """Refuse a field that differs from what `owner` says."""
        if self.get(name, type(value)) != value:
            raise ValueError(f"{self.path}: {name} is {self.get(name, type(value))}, {owner} {value}")

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse a field whose value would need code that is not here."""
        for place in (self.block, self.top):
            if place.get(name) not in (None, *harmless):
                raise ValueError(f"{self.path}: {name} = {place[name]!r} is not supported")

    def refuse_unknown(self, top: Collection[str], block: Collection[str]) -> None:
        """Refuse fields whose meaning is not known; names that begin with _ are notes of their writer."""
        for where, place, known in (("", self.top, top), ("dflash_config.", self.block, block)):
            for name in place:
                if name not in known and not name.startswith("_"):
                    raise ValueError(f"{self.path}: field {where}{name} is unknown: what it changes is not implemented")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a draft model's folder; raises ValueError where there is none."""
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a draft model: {path.name} is missing")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, found {type(values).__name__}")
    return values


def object_at(path: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    """The object that stands under `name` in a JSON file, empty where there is none; everything else is an error."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}: field {name} must be an object, got {value!r}")
    return value or {}


def rope_fields(theta: float, yarn: YarnConfig | None) -> dict[str, Any]:
    """RoPE in the old and the new schema: servers read either, and silently do without where theirs is missing."""
    if yarn is None:
        return {
            "rope_theta": theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    scaling = {key: value for key, value in dataclasses.asdict(yarn).items() if value is not None}
    return {
        "rope_theta": theta,
        "rope_scaling": {"type": "yarn", "rope_type": "yarn", **scaling},
        "rope_parameters": {"rope_type": "yarn", "rope_theta": theta, **scaling},
    }


def read_rope(config: Fields, target_theta: float | None = None) -> tuple[float, YarnConfig | None]:
    """RoPE base and YaRN of either schema; what stands in both must agree, and the base be the target's."""
    parameters, scaling = config.object("rope_parameters"), config.object("rope_scaling")
    stated = [place["rope_theta"] for place in (parameters, scaling, config.top) if place.get("rope_theta") is not None]
    if not stated:
        raise ValueError(f"{config.path}: field rope_theta is missing")
    for value in stated:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{config.path}: field rope_theta must be a number above 0, got {value!r}")
    bases = set(stated)
    if len(bases) > 1 or (target_theta is not None and bases != {target_theta}):
        values = " and ".join(sorted(str(value) for value in bases))
        wanted = "it must be one value" if target_theta is None else f"the target's is {target_theta}"
        raise ValueError(f"{config.path}: rope_theta is {values}, {wanted}")
    yarns = [
        _yarn(config, name, values) for name, values in (("rope_parameters", parameters), ("rope_scaling", scaling))
    ]
    stretched = [yarn for yarn in yarns if yarn is not None]
    if parameters and scaling and yarns[0] != yarns[1]:
        raise ValueError(f"{config.path}: rope_parameters say {yarns[0]}, rope_scaling says {yarns[1]}")
    return float(bases.pop()), stretched[0] if stretched else None


def _yarn(config: Fields, name: str, values: dict[str, Any]) -> YarnConfig | None:
    """YaRN of one schema, None for plain RoPE; mscale == mscale_all_dim means no temperature, as in transformers."""
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"{config.path}: {name}.rope_type = {kind!r} is not supported")
    rest = {key: value for key, value in values.items() if key not in ("rope_type", "type", "rope_theta")}
    if kind == "default":
        if rest:
            raise ValueError(f"{config.path}: field {name}.{next(iter(rest))} is unknown for plain RoPE")
        return None
    scales = [rest.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    if scales != [None, None]:
        if scales[0] != scales[1]:
            raise ValueError(
                f"{config.path}: {name}.mscale = {scales[0]!r} with mscale_all_dim = {scales[1]!r} is not supported"
            )
        rest.setdefault("attention_factor", 1.0)
    for key in ("factor", "original_max_position_embeddings"):
        if key not in rest:
            raise ValueError(f"{config.path}: field {name}.{key} is missing")
    return from_dict(YarnConfig, rest, f"{config.path}: {name}.")
