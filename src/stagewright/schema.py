"""Frozen dataclasses that check themselves, and the files they live in.

A file holds one of them, as JSON (`.json`) or YAML (`.yaml`, `.yml`):

    format: stagewright.cluster
    version: 1
    name: …
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from stagewright.errors import FileError, StagewrightError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MAX_FILE_BYTES, _MAX_DEPTH, _MAX_YAML_VALUES = 1 << 30, 64, 1_000_000
"""The values of a YAML file are counted with its aliases written out."""

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlong, _BRIEF.maxother = 3, 60, 60

_T = TypeVar("_T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def schema(*, error: type[StagewrightError]) -> Callable[[type[_T]], type[_T]]:
    """Makes a class a frozen dataclass whose wrong values raise `error` with the key and the value."""

    def make(cls: type[_T]) -> type[_T]:
        made = checked_dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
        plain_init = made.__init__

        def __init__(self: Any, **values: Any) -> None:
            try:
                plain_init(self, **values)
            except ValidationError as fault:
                wrong = error(f"{cls.__name__}: {describe(fault)}")
                wrong.schema, wrong.key = cls.__name__, _key_of(fault)
                raise wrong from None

        made.__init__ = __init__  # type: ignore[method-assign]
        return made  # type: ignore[return-value]

    return make


def describe(fault: ValidationError) -> str:
    """The first fault as `key devices[3].memory_bytes is '12 GB': expected a valid integer`."""
    first, key = fault.errors(include_url=False)[0], _key_of(fault)
    if first["type"] == "missing":
        return f"key {key} is missing"
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"key {key} is unknown"
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return f"cannot be read: {message}"
    expected = "expected " + message.removeprefix("Input should be ") if message.startswith("Input") else message
    return f"key {key} is {shown(first['input'])}: {expected}"


def _key_of(fault: ValidationError) -> str:
    """Where the first fault lies: `devices[3].memory_bytes`."""
    place = fault.errors(include_url=False)[0]["loc"]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def shown(value: object) -> str:
    """A value as an error shows it, cut where it is long; what it holds many times over is never written out."""
    text = repr(value[:60]) if isinstance(value, str | bytes) else _BRIEF.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """What checks and writes values of this type."""
    return TypeAdapter(cls)


class Saved:
    """What has a file: `save` writes it, `load` reads and checks it."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    DROPPED: ClassVar[frozenset[str]] = frozenset()
    """Keys that older versions wrote and this one does without."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Keys that older versions wrote, and what they are called now."""
    ERROR: ClassVar[type[StagewrightError]] = FileError

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the format and version first."""
        body = adapter(cast(Any, type(self))).dump_python(self, mode="json")
        return {"format": self.FORMAT, "version": self.VERSION, **body}

    def save(self, path: str | Path) -> Path:
        """Writes the file whole or not at all; the ending chooses JSON or YAML."""
        return write_whole(Path(path), (dump_yaml if is_yaml(Path(path)) else dump_json)(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What the file holds; a file that holds anything else raises a FileError."""
        return cls.from_dict(read_plain(Path(path)), where=str(path))

    @classmethod
    def ready_made(cls) -> dict[str, Path]:
        """The files that come with the package, by name; a checkout may have them at its root, beside other formats."""
        package, mark = Path(__file__).parent, f"format: {cls.FORMAT}\n"
        folders = (each / f"{cls.FORMAT.removeprefix('stagewright.')}s" for each in (package, package.parents[1]))
        found = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
        return {path.stem: path for path in found if mark in path.read_text(encoding="utf-8")}

    @classmethod
    def find(cls, name_or_file: str) -> Self:
        """What a file holds, or the ready-made one of that name."""
        return cls.load(cls.locate(name_or_file))

    @classmethod
    def locate(cls, name_or_file: str) -> Path:
        """The file, or the ready-made one of that name."""
        known, what = cls.ready_made(), cls.FORMAT.removeprefix("stagewright.")
        if name_or_file not in known and Path(name_or_file).suffix not in (".yaml", ".yml", ".json"):
            told = f"no {what} is named {name_or_file!r}; ready-made: {', '.join(known) or 'none'}"
            raise cls.ERROR(told, "give one of these names, or a .yaml or .json file")
        return known.get(name_or_file, Path(name_or_file))

    @classmethod
    def from_dict(cls, plain: object, *, where: str = "the data") -> Self:
        """What `to_dict` was called on, checked key by key."""
        body = check_head(plain, cls.FORMAT, cls.VERSION, where)
        if isinstance(plain, dict) and plain["version"] < cls.VERSION:
            body = {cls.RENAMED.get(key, key): value for key, value in body.items() if key not in cls.DROPPED}
        try:
            made: Self = adapter(cast(Any, cls)).validate_json(json.dumps(body, ensure_ascii=False))
            return made
        except ValidationError as fault:
            raise FileError(f"{where}: {describe(fault)}") from None
        except (TypeError, ValueError, RecursionError) as fault:
            raise FileError(f"{where}: cannot be read as {cls.FORMAT}: {fault}") from None
        except StagewrightError as fault:
            raise type(fault)(f"{where}: {fault.what}", fault.todo) from None


def write_whole(path: Path, text: str) -> Path:
    """The file, written whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        return part.replace(path)
    except OSError as fault:
        with suppress(OSError):
            part.unlink()
        raise FileError(f"{path}: {fault.strerror}", "give a path that can be written") from None


def check_head(plain: object, format_name: str, version: int, where: str) -> dict[str, Any]:
    """The body of a file whose format and version are the expected ones."""
    if not isinstance(plain, dict):
        raise FileError(f"{where}: holds {type(plain).__name__}, expected the keys of {format_name}")
    found, number = plain.get("format"), plain.get("version")
    if found != format_name:
        own, wanted = (str(name).removeprefix("stagewright.") for name in (found, format_name))
        todo = f"it holds a {own}, and a {wanted} is wanted" if str(found).startswith("stagewright.") else None
        raise FileError(f"{where}: key format is {shown(found)}: expected {format_name!r}", todo)
    if type(number) is not int or number < 1:
        raise FileError(f"{where}: key version is {shown(number)}: expected a whole number from 1 to {version}")
    if number > version:
        raise FileError(
            f"{where}: version {number} of {format_name} is newer than {version}, the newest known here",
            "update stagewright, or save the file with this version",
        )
    return {key: value for key, value in plain.items() if key not in ("format", "version")}


def is_yaml(path: Path) -> bool:
    """Whether a file of this name holds YAML; any other holds JSON."""
    return path.suffix in (".yaml", ".yml")


def read_plain(path: Path) -> object:
    """What a JSON or YAML file holds, as plain values."""
    return parse_plain(read_text(path), is_yaml=is_yaml(path), where=str(path))


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise FileError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as fault:
        raise FileError(f"{path}: {fault.strerror}", "give the path of a file that is there") from None
    except UnicodeDecodeError as fault:
        raise FileError(f"{path}: not text in UTF-8 (byte {fault.start})") from None
    except ValueError as fault:  # a NUL in the path
        raise FileError(f"{str(path)!r}: {fault}") from None


def parse_plain(text: str, *, is_yaml: bool, where: str) -> object:
    """Plain values from JSON or YAML text; the damage is named with its line."""
    try:
        return _load_yaml(text) if is_yaml else json.loads(text, object_pairs_hook=_without_twins, parse_int=_small_int)
    except json.JSONDecodeError as fault:
        raise FileError(f"{where}: not JSON: {fault.msg} in line {fault.lineno}, column {fault.colno}") from None
    except yaml.YAMLError as fault:
        raise FileError(f"{where}: not YAML: {' '.join(str(fault).split())}") from None
    except RecursionError:
        raise FileError(f"{where}: nested too deeply: expected {_MAX_DEPTH} levels at most") from None
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as fault:
        # PyYAML's constructors fail in all these ways on a value that contradicts its tag
        raise FileError(f"{where}: cannot be read: {fault}") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"key {shown(twin(key for key, _ in pairs))} stands twice in one object")
    return made


def twin(values: Iterable[_T]) -> _T:
    """The first of the values that stands there more than once."""
    return next(value for value, number in Counter(values).items() if number > 1)


def _small_int(text: str) -> int:
    """The whole number that a text writes, if it has 64 bits at most."""
    number = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"number {shown(text)} is too large: expected one of 64 bits")
    return number


def _load_yaml(text: str) -> object:
    loader = _PlainLoader(text)
    try:
        value: object = loader.get_single_data()
    finally:
        loader.dispose()
    _check_size(value)
    return value


def _check_size(value: object) -> None:
    """Refuses what grows out of hand once its aliases are written out, or never ends."""
    level, room = [value], _MAX_YAML_VALUES
    for _ in range(_MAX_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = list(islice(chain.from_iterable(inside), room + 1))
        room -= len(level)
        if room < 0:
            raise ValueError(f"more than {_MAX_YAML_VALUES:,} values: save what is that large as JSON")
        if not level:
            return
    raise RecursionError


_YAML = "tag:yaml.org,2002:"


class _PlainLoader(yaml.SafeLoader):
    """YAML whose values are those of JSON: no dates, no `1:30` for 90, no `no` for false, no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            # A list or object as a key may hold others many times over, and merging keys multiplies them.
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_YAML}str":
                raise ValueError(f"the key in line {key.start_mark.line + 1} is no text: write it in quotes")
        texts = [key.value for key in keys]
        if len(set(texts)) < len(texts):
            where = f"in the keys from line {node.start_mark.line + 1} on"
            raise ValueError(f"key {shown(twin(texts))} stands twice {where}")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        return _small_int(str(self.construct_scalar(node)))


_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", (*"~nN", "")),
)
"""What unquoted text means: the core schema of YAML 1.2 (section 10.3), which is that of JSON."""


def _resolve_as_json(cls: Any) -> None:
    cls.yaml_implicit_resolvers = {}
    for name, pattern, first in _RESOLVERS:
        cls.add_implicit_resolver(f"{_YAML}{name}", re.compile(rf"(?:{pattern})\Z"), list(first))


_resolve_as_json(_PlainLoader)
_PlainLoader.add_constructor(f"{_YAML}int", _PlainLoader.construct_yaml_int)


def dump_json(plain: object, indent: int = 0) -> str:
    """JSON with lists and objects on one line where they fit into 110 columns, so that people can read it."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    if len(text) + indent > 110 and isinstance(plain, dict | list) and plain:
        first, last = "{}" if isinstance(plain, dict) else "[]"
        keys = [f"{json.dumps(key, ensure_ascii=False)}: " for key in plain] if isinstance(plain, dict) else repeat("")
        values = plain.values() if isinstance(plain, dict) else plain
        pad = " " * (indent + 2)
        lines = [f"{pad}{key}{dump_json(value, indent + 2).rstrip()}" for key, value in zip(keys, values)]
        text = f"{first}\n" + ",\n".join(lines) + f"\n{' ' * indent}{last}"
    return text + "\n"


def dump_yaml(plain: object) -> str:
    """YAML with the keys in their own order."""
    return yaml.dump(plain, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=110)


class _PlainDumper(yaml.SafeDumper):
    """Short lists of numbers and names on one line; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        # other styles lose line separators and the like
        return self.represent_scalar(f"{_YAML}str", data, style=None if data.isprintable() else '"')

    def represent_list(self, data: Any) -> Any:
        flat = all(isinstance(item, (int, float, str, bool)) for item in data)
        return self.represent_sequence(f"{_YAML}seq", data, flow_style=flat)


_resolve_as_json(_PlainDumper)
_PlainDumper.add_representer(str, _PlainDumper.represent_str)
_PlainDumper.add_representer(list, _PlainDumper.represent_list)
