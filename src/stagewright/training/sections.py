"""Frozen dataclasses as sections of a file and as options of a verb: keys, help texts, and how values are read."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from stagewright.errors import StagewrightError, UsageError
from stagewright.planning.options import spelled
from stagewright.schema import adapter, describe, shown

_T = TypeVar("_T")


class Key(NamedTuple):
    """A field of a section as files and command lines have it."""

    name: str
    """Of the field."""
    option: str
    """As people type it: --timeout for timeout_s, --plan for file."""
    kind: Any
    """The type of its values; of one of them where the field is a tuple."""
    is_many: bool
    choices: tuple[str, ...]
    default: Any
    about: str

    @property
    def key(self) -> str:
        """What a file calls it."""
        return self.option[2:].replace("-", "_")


def _option_of(name: str) -> str:
    return "--plan" if name == "file" else spelled(name.rstrip("_")).removesuffix("-s")


@cache
def section_keys(cls: Any) -> tuple[Key, ...]:
    """Every key of a section, in the order of its fields."""
    hints, about = get_type_hints(cls), _field_docs(cls)
    made = []
    for each in fields(cls):
        hint = hints[each.name]
        kind = hint
        if get_origin(hint) not in (tuple, Literal):
            kind = next(part for part in get_args(hint) or (hint,) if part is not NoneType)
        is_many = get_origin(kind) is tuple
        kind = get_args(kind)[0] if is_many else kind
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        default = getattr(each.default, "default", each.default)  # plain, or pydantic's
        default = MISSING if default is PydanticUndefined else default
        text = about.get(each.name, "")
        made.append(Key(each.name, _option_of(each.name), str if choices else kind, is_many, choices, default, text))
    return tuple(made)


def _field_docs(cls: Any) -> dict[str, str]:
    """The sentence under each field, which is also the help text of its option."""
    found: dict[str, str] = {}
    for base in reversed([each for each in cls.__mro__ if hasattr(each, "__dataclass_fields__")]):
        tree = ast.parse(Path(str(sys.modules[base.__module__].__file__)).read_text(encoding="utf-8"))
        bodies = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for line, after in (pair for body in bodies for pair in zip(body, body[1:])):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[line.target.id] = " ".join(text.value.split())
    return found


def read_section(cls: Callable[..., _T], values: Mapping[str, Any], *, where: str = "") -> _T:
    """The section that plain values by key make; `where` is what stands before a key in an error, else options do."""
    known = {each.key: each for each in section_keys(cls)}
    for key in values:
        if key not in known:
            raise UsageError(f"{where}{key} is unknown", f"there are {', '.join(known)}")
    plain = {known[key].name: _as_written(known[key], value, where) for key, value in values.items()}
    try:
        made: _T = adapter(cls).validate_json(json.dumps(plain), strict=True)
        return made
    except ValidationError as fault:
        name = str(fault.errors(include_url=False)[0]["loc"][0])
        what, todo = _in_words(describe(fault).replace(f"key {name}", _option_of(name), 1)), None
    except StagewrightError as fault:
        what, todo = fault.what, fault.todo
    if where:
        of_one = re.match(r"--([\w-]+)(?=\S* is )", what)
        key = "" if of_one is None else of_one[1].replace("-", "_")
        what = where + key + what[of_one.end() :] if of_one else where.rpartition("key ")[0] + what
    raise UsageError(what if where else re.sub(r"^(--[\w-]+)\[\d+\] is ", r"\1 has ", what), todo)


def _in_words(text: str) -> str:
    """`1 or more` for pydantic's `greater than or equal to 1`, `one of a, b, c` for its `'a', 'b' or 'c'`."""
    text = re.sub(r"greater than or equal to (\S+)", r"\1 or more", text)
    many = re.search(r"expected ('[^']*'(?:, '[^']*')+ or '[^']*')$", text)
    return text if many is None else text[: many.start(1)] + "one of " + many[1].replace(" or ", ", ").replace("'", "")


def _as_written(key: Key, value: Any, where: str) -> Any:
    """A value as the field takes it: `fc1,fc2` is a list, and a number where text is wanted is that text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not key.is_many:
        return str(value) if key.kind is str and is_number else value
    if not is_number and not isinstance(value, str):
        return value
    text, name = str(value), f"{where}{key.key}" if where else key.option
    parts = [part.strip() for part in text.split(",")]
    if key.kind is int:
        if not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) for part in parts):
            raise UsageError(f"{name} is {shown(text)}: expected whole numbers such as 30,60,80")
        return [int(part) for part in parts]
    if "" in parts:
        todo = "name the layers that begin new stages: fc1,fc2" if key.key == "cut" else None
        raise UsageError(f"{name} {text!r} names no {'layer' if key.key == 'cut' else key.key}", todo)
    return parts
