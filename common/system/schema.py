"""Checks the values of an untrusted JSON object against the expected types."""

import dataclasses
import types
import typing
from typing import Any

# A type, list[Kind], tuple[Kind, ...], dict[str, Kind], a TypedDict, a dataclass, or a union of them.
# float: any finite number. [Kind]: a list.
# {key: Kind, "*": Kind of all other keys}: an object whose values may also be null.
Kind = Any


def fitting(content: dict[str, Any], kinds: dict[str, Kind]) -> tuple[dict[str, Any], list[str]]:
    """The values with the expected type, and the names of those with another type.

    Unknown keys and nulls are in neither.
    """
    kept, wrong = {}, []
    for key, value in content.items():
        kind = kinds.get(key, kinds.get("*"))
        if kind is None or value is None:
            continue
        if fits(value, kind):
            kept[key] = value
        else:
            wrong.append(key)
    return kept, wrong


def fits(value: Any, kind: Kind) -> bool:
    """True if the value, read from JSON, is of that kind."""
    if kind is Any:
        return True
    if isinstance(kind, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(kind))
    if isinstance(kind, dict):
        return isinstance(value, dict) and not fitting(value, kind)[1]
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return isinstance(value, dict) and all(key in value and fits(value[key], hints[key]) for key in hints)
    if isinstance(kind, list) or typing.get_origin(kind) in (list, tuple):
        item_kind = kind[0] if isinstance(kind, list) else typing.get_args(kind)[0]
        return isinstance(value, list) and all(fits(item, item_kind) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(v, typing.get_args(kind)[1]) for v in value.values())
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and -(2**63) < value < 2**63
    return isinstance(value, kind)
