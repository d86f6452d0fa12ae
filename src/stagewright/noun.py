"""What the five nouns share: frozen dataclasses that check themselves, and the files they live in.

A file holds one noun, as JSON (`.json`) or YAML (`.yaml`, `.yml`):

    format: stagewright.cluster
    version: 1
    name: …
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from stagewright.errors import FileError, StagewrightError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
MAX_FILE_BYTES = 1 << 30

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def noun(*, error: type[StagewrightError]) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass whose wrong values raise `error` with the key and the value."""

    def make(cls: type[T]) -> type[T]:
        made = checked_dataclass(frozen=True, kw_only=True, config=STRICT)(cls)
        plain_init = made.__init__

        def __init__(self: Any, **values: Any) -> None:
            try:
                plain_init(self, **values)
            except ValidationError as fault:
                raise error(f"{cls.__name__}: {describe(fault)}") from None

        made.__init__ = __init__  # type: ignore[method-assign]
        return made  # type: ignore[return-value]

    return make


def describe(fault: ValidationError) -> str:
    """The first fault as `key devices[3].memory_bytes is '12 GB': expected a valid integer`."""
    first = fault.errors(include_url=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return f"key {key} is missing"
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"key {key} is unknown"
    value = repr(first["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"key {key} is {value}: expected {expected}"


class Saved:
    """A noun with a file: `save` writes it, `load` reads and checks it."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    ERROR: ClassVar[type[StagewrightError]] = FileError

    def to_dict(self) -> dict[str, Any]:
        """The noun as plain values, with its format and version first."""
        body = TypeAdapter(type(self)).dump_python(self, mode="json")
        return {"format": self.FORMAT, "version": self.VERSION, **body}

    def save(self, path: str | Path) -> Path:
        """Writes the file whole or not at all; the ending chooses JSON or YAML."""
        path = Path(path)
        text = dump_yaml(self.to_dict()) if path.suffix in (".yaml", ".yml") else dump_json(self.to_dict())
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The noun in a file; a file that is anything else raises a FileError."""
        return cls.from_dict(read_plain(Path(path)), where=str(path))

    @classmethod
    def from_dict(cls, plain: object, *, where: str = "the data") -> Self:
        """The noun that `to_dict` gave, checked key by key."""
        body = check_head(plain, cls.FORMAT, cls.VERSION, where)
        try:
            text = json.dumps(body, allow_nan=True)
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as fault:
            raise FileError(f"{where}: {describe(fault)}") from None
        except (TypeError, ValueError, RecursionError) as fault:
            raise FileError(f"{where}: cannot be read as {cls.FORMAT}: {fault}") from None
        except StagewrightError as fault:
            raise type(fault)(f"{where}: {fault.what}", fault.todo) from None


def check_head(plain: object, format_name: str, version: int, where: str) -> dict[str, Any]:
    """The body of a file whose format and version are the expected ones."""
    if not isinstance(plain, dict):
        raise FileError(f"{where}: holds {type(plain).__name__}, expected the keys of {format_name}")
    found, number = plain.get("format"), plain.get("version")
    if found != format_name:
        raise FileError(f"{where}: key format is {found!r}: expected {format_name!r}")
    if type(number) is not int or number < 1:
        raise FileError(f"{where}: key version is {number!r}: expected a whole number from 1 to {version}")
    if number > version:
        raise FileError(
            f"{where}: version {number} of {format_name} is newer than {version}, the newest known here",
            "update stagewright, or save the file with this version",
        )
    return {key: value for key, value in plain.items() if key not in ("format", "version")}


def read_plain(path: Path) -> object:
    """What a JSON or YAML file holds, as plain values."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise FileError(f"{path}: {fault.strerror}") from None
    except UnicodeDecodeError as fault:
        raise FileError(f"{path}: not text in UTF-8 (byte {fault.start})") from None
    return parse_plain(text, is_yaml=path.suffix in (".yaml", ".yml"), where=str(path))


def parse_plain(text: str, *, is_yaml: bool, where: str) -> object:
    """Plain values from JSON or YAML text; the damage is named with its line."""
    try:
        return yaml.load(text, Loader=PlainLoader) if is_yaml else json.loads(text)
    except json.JSONDecodeError as fault:
        raise FileError(f"{where}: not JSON: {fault.msg} in line {fault.lineno}, column {fault.colno}") from None
    except yaml.YAMLError as fault:
        raise FileError(f"{where}: not YAML: {' '.join(str(fault).split())}") from None
    except (ValueError, RecursionError, OverflowError) as fault:
        raise FileError(f"{where}: cannot be read: {fault}") from None


class PlainLoader(yaml.SafeLoader):
    """Safe YAML without dates, so that every value is one that JSON has too, and without alias bombs."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases = getattr(self, "num_aliases", 0) + 1
            if self.num_aliases > 64:
                raise yaml.YAMLError("more than 64 aliases")
        return super().compose_node(parent, index)


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def dump_json(plain: object, *, width: int = 110) -> str:
    """JSON with short lists and objects on one line, so that people can read it."""

    def write(value: object, indent: int) -> str:
        flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if len(flat) + indent <= width or not isinstance(value, (dict, list)) or not value:
            return flat
        pad = " " * (indent + 2)
        if isinstance(value, dict):
            inner = [f"{json.dumps(key, ensure_ascii=False)}: {write(item, indent + 2)}" for key, item in value.items()]
            return "{\n" + ",\n".join(pad + line for line in inner) + "\n" + " " * indent + "}"
        inner = [write(item, indent + 2) for item in value]
        return "[\n" + ",\n".join(pad + line for line in inner) + "\n" + " " * indent + "]"

    return write(plain, 0) + "\n"


def dump_yaml(plain: object) -> str:
    """YAML with the keys in their own order."""
    return yaml.dump(plain, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=110)


class PlainDumper(yaml.SafeDumper):
    """Short lists of numbers and names on one line; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_float(self, data: float) -> Any:
        text = repr(data)
        if "e" in text and "." not in text.split("e")[0]:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_list(self, data: Any) -> Any:
        flat = all(isinstance(item, (int, float, str, bool)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


PlainDumper.add_representer(float, PlainDumper.represent_float)
PlainDumper.add_representer(list, PlainDumper.represent_list)
