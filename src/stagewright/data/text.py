"""Documents in text files, in their order: .txt, .jsonl and .parquet.

a .txt file                                  one document
{"text": "…"}                                one document, every token counts
{"prompt": "…", "completion": "…"}           the completion counts
{"messages": [{"role": …, "content": …}]}    a chat: what the assistant says counts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stagewright.data.source import OnCorrupt, need
from stagewright.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".parquet")
Kind: TypeAlias = Literal["text", "completion", "messages"]


@dataclass(frozen=True)
class Document:
    """One document: its text, prompt and completion, or messages; and where it stands."""

    kind: Kind
    parts: tuple[Any, ...]
    path: Path
    line: int
    """Counted from 1; in a .parquet file its row."""

    def __len__(self) -> int:
        """Its characters, about."""
        return sum(len(part) if isinstance(part, str) else len(str(part)) for part in self.parts)

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"


def text_files(path: str | Path) -> tuple[Path, ...]:
    """The text files at a path, sorted by name; refused where there are none."""
    given = Path(path)
    if given.is_file():
        if given.suffix not in SUFFIXES:
            raise DataError(f"{given} is no text file", f"give one that ends in {', '.join(SUFFIXES)}")
        found: tuple[Path, ...] = (given,)
    elif given.is_dir():
        found = tuple(sorted(file for file in given.rglob("*") if file.suffix in SUFFIXES and file.is_file()))
    else:
        raise DataError(f"{given} does not exist", "give a text file, or a folder of them")
    if not found:
        raise DataError(f"{given} holds no text file", f"text files end in {', '.join(SUFFIXES)}")
    if any(file.suffix == ".parquet" for file in found):
        need(f"{given}, which holds .parquet files,", "pyarrow")
    return found


def read_documents(path: Path, on_corrupt: OnCorrupt, skip: int = 0) -> Iterator[tuple[int, Document | DataError]]:
    """A file's lines after the first `skip`, each with its document, or with its fault where faults are skipped.

    Lines that hold nothing but spaces are left out.
    """
    for line, record in _records(path):
        if line <= skip:
            continue
        try:
            found: Document | DataError | None = _document(path, line, record)
        except DataError as fault:
            if on_corrupt == "stop":
                raise
            found = fault
        if found is not None:
            yield line, found


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered lines of a file: text of a .txt file as a whole, bytes of JSON, or a mapping."""
    if path.suffix == ".txt":
        yield 1, path.read_bytes()
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    else:
        yield from enumerate(_parquet_rows(path), start=1)


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path} is no whole .parquet file: {str(error).splitlines()[0]}", "fetch it again") from error


def _document(path: Path, line: int, record: Any) -> Document | None:
    """The document that a record holds, None where it is an empty line."""
    where = f"{path}, line {line}"
    if path.suffix == ".txt":
        text = _decoded(record, str(path))
        return Document("text", (text,), path, 1) if text.strip() else None
    if path.suffix == ".jsonl":
        if not record.strip():
            return None
        record = _parsed(record, where)
    for keys, kind in ((("messages",), "messages"), (("prompt", "completion"), "completion"), (("text",), "text")):
        if isinstance(record, Mapping) and all(record.get(key) is not None for key in keys):
            values = tuple(record[key] for key in keys)
            _check_values(values, kind, where)
            return Document(kind, values, path, line)  # type: ignore[arg-type]
    held = ", ".join(map(str, record)) or "no key" if isinstance(record, Mapping) else f"a {type(record).__name__}"
    raise DataError(f"{where} holds {held}", 'expected "text", "messages", or "prompt" and "completion"')


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is no UTF-8 text: byte {error.start:,} is {data[error.start]:#x}") from error


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(_decoded(data, where))
    except (ValueError, RecursionError) as error:
        told = getattr(error, "msg", None) or "it is nested too deeply"
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{where} is no JSON: {told}{at}", "correct it, or leave it out with --on-corrupt skip"
        ) from error


def _check_values(values: tuple[Any, ...], kind: str, where: str) -> None:
    """Refuses values that no tokenizer takes, and documents without a word."""
    if kind != "messages":
        wrong = [value for value in values if not isinstance(value, str)]
        if wrong:
            raise DataError(f"{where} holds a {type(wrong[0]).__name__} for its text", "expected a string")
        if not any(value.strip() for value in values[-1:]):
            raise DataError(f"{where} holds an empty {'text' if kind == 'text' else 'completion'}")
        return
    (messages,) = values
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise DataError(f"{where}: its messages are no list of mappings", 'expected [{"role": …, "content": …}, …]')
    if not any(each.get("role") == "assistant" for each in messages):
        raise DataError(f"{where}: the assistant says nothing", 'add a message of the role "assistant"')
