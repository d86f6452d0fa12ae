"""Frozen dataclasses as sections of a file and as options of a verb: keys, help texts, and how values are read."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from stagewright.errors import StagewrightError, UsageError
from stagewright.planning.options import spelled
from stagewright.schema import adapter, describe, shown

_T = TypeVar("_T")


class Key(NamedTuple):
    """A field of a section as files and command lines have it."""

    name: str
    """Of the field."""
    key: str
    option: str
    kind: Any
    """The type of its values; of one of them where the field is a tuple."""
    is_many: bool
    choices: tuple[str, ...]
    default: Any
    about: str


def _key_of(name: str) -> str:
    """The key of a field: its option without dashes at the front, and with underscores."""
    return _option_of(name)[2:].replace("-", "_")


def _option_of(name: str) -> str:
    """The option of a field, as people type it: --timeout for timeout_s, --plan for file."""
    return "--plan" if name == "file" else spelled(name).removesuffix("-s")


@cache
def section_keys(cls: Any) -> tuple[Key, ...]:
    """Every key of a section, in the order of its fields."""
    hints, about = get_type_hints(cls), _field_docs(cls)
    made = []
    for each in fields(cls):
        kinds = [kind for kind in get_args(hints[each.name]) or (hints[each.name],) if kind is not NoneType]
        kind = hints[each.name] if get_origin(hints[each.name]) in (tuple, Literal) else kinds[0]
        is_many = get_origin(kind) is tuple
        kind = get_args(kind)[0] if is_many else kind
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        made.append(
            Key(
                each.name, _key_of(each.name), _option_of(each.name), str if choices else kind, is_many, choices,
                _default_of(each), about.get(each.name, ""),
            )
        )  # fmt: skip
    return tuple(made)


def _default_of(field: Any) -> Any:
    """The default of a field, plain or pydantic's; MISSING where it has none."""
    default = getattr(field.default, "default", field.default)
    return MISSING if type(default).__name__ == "PydanticUndefinedType" else default


def _field_docs(cls: Any) -> dict[str, str]:
    """The sentence under each field, which is also the help text of its option."""
    found: dict[str, str] = {}
    for base in reversed([each for each in cls.__mro__ if hasattr(each, "__dataclass_fields__")]):
        tree = ast.parse(Path(str(sys.modules[base.__module__].__file__)).read_text(encoding="utf-8"))
        bodies = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for body in bodies:
            for line, after in zip(body, body[1:]):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    text = after.value if isinstance(after, ast.Expr) else None
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        found[line.target.id] = " ".join(text.value.split())
    return found


def read_section(
    cls: Callable[..., _T], values: Mapping[str, Any], *, leave: Collection[str] = (), where: str = ""
) -> _T:
    """The section that plain values by key make; `where` is what stands before a key in an error, else options do."""
    known = {each.key: each for each in section_keys(cls) if each.name not in leave}
    for key in values:
        if key not in known:
            raise UsageError(f"{where}{key} is unknown", f"there are {', '.join(known)}")
    plain = {known[key].name: _as_written(known[key], value, where) for key, value in values.items()}
    try:
        made: _T = adapter(cls).validate_json(json.dumps(plain), strict=True)
        return made
    except ValidationError as fault:
        name = str(fault.errors(include_url=False)[0]["loc"][0])
        told = where + _key_of(name) if where else _option_of(name)
        text = _in_words(describe(fault).replace(f"key {name}", told, 1))
        raise UsageError(text if where else re.sub(r"^(--[\w-]+)\[\d+\] is ", r"\1 has ", text)) from None
    except StagewrightError as fault:
        if not where:
            raise
        of_one = re.match(r"--(\S+) is ", fault.what)
        told = where + of_one[1].replace("-", "_") + fault.what[of_one.end(1) :] if of_one else ""
        raise UsageError(told or where.rpartition("key ")[0] + fault.what, fault.todo) from None


def _in_words(text: str) -> str:
    """`1 or more` for pydantic's `greater than or equal to 1`, `one of a, b, c` for its `'a', 'b' or 'c'`."""
    text = re.sub(r"greater than or equal to (\S+)", r"\1 or more", text)
    many = re.search(r"expected ('[^']*'(?:, '[^']*')+ or '[^']*')$", text)
    return (
        text if many is None else f"{text[: many.start(1)]}one of {many[1].replace(' or ', ', ').replace(chr(39), '')}"
    )


def _as_written(key: Key, value: Any, where: str) -> Any:
    """A value as the field takes it: `fc1,fc2` is a list, and a number where text is wanted is that text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.is_many and (isinstance(value, str) or is_number):
        return split_words(key, (str(value),), where)
    return str(value) if key.kind is str and is_number and not key.is_many else value


def split_words(key: Key, words: Sequence[str], where: str = "") -> list[Any]:
    """The values that `--cut a,b`, `--cut a --cut b` or both name."""
    text, name = ",".join(words), f"{where}{key.key}" if where else key.option
    parts = [part.strip() for part in text.split(",")]
    if key.kind is int:
        if not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) for part in parts):
            raise UsageError(f"{name} is {shown(text)}: expected whole numbers such as 30,60,80")
        return [int(part) for part in parts]
    if "" in parts:
        todo = "name the layers that begin new stages: fc1,fc2" if key.key == "cut" else None
        raise UsageError(f"{name} {text!r} names no {'layer' if key.key == 'cut' else key.key}", todo)
    return list(parts)
