"""Hypothesis strategies for JSON schemas, as far as the endpoint's own document uses them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NEAR = 20  # half of all integers are so near to their lower bound
WIDE = 2**70
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-WIDE, WIDE) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def values(schema: Any, schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows; True and {} allow any JSON."""
    if schema is True or not schema.keys() - {"title", "default", "description"}:
        return ANY
    if "$ref" in schema:
        return values(schemas[schema["$ref"].rsplit("/", 1)[-1]], schemas)
    if "anyOf" in schema:
        return st.one_of([values(one, schemas) for one in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    return {
        "object": _objects,
        "array": _arrays,
        "string": lambda schema, _: st.text(min_size=schema.get("minLength", 0), max_size=12),
        "integer": lambda schema, _: _integers(schema),
        "number": lambda schema, _: _numbers(schema),
        "boolean": lambda _schema, _: st.booleans(),
        "null": lambda _schema, _: st.none(),
    }[schema["type"]](schema, schemas)


def _objects(schema: dict[str, Any], schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        keys = st.integers(0, 300).map(str) | st.text(max_size=8)
        return st.dictionaries(keys, values(schema["additionalProperties"], schemas), max_size=3)
    fields = {name: values(one, schemas) for name, one in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", [])}
    return st.fixed_dictionaries(required, optional=fields)


def _arrays(schema: dict[str, Any], schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    items = st.one_of([values(one, schemas) for one in schema["items"].get("anyOf", [schema["items"]])])
    return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(4, schema.get("maxItems", 4)))


def _integers(schema: dict[str, Any]) -> st.SearchStrategy[int]:
    low = schema.get("minimum", -WIDE)
    high = schema.get("maximum", schema.get("exclusiveMaximum", WIDE + 1) - 1)
    return st.integers(low, min(high, low + NEAR)) | st.integers(low, high)


def _numbers(schema: dict[str, Any]) -> st.SearchStrategy[float]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    return st.floats(low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema, allow_nan=False)
