"""A folder of tokens: made once from text, then mapped into memory by every worker.

tokens.bin       every document's tokens, one after the other, as 16 or 32 bits
documents.bin    a row a document: its first token, its file, its line
ignored.bin      a row a run of tokens that do not count: first, one past the last
progress.jsonl   a line whenever some documents are complete; what is behind the last one is written again
tokens.json      what it is made of; there once all is done
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.data.source import Indices, OnCorrupt
from stagewright.data.text import (
    Document,
    Tokenized,
    Tokenizer,
    find_tokenizer,
    fingerprint,
    read_documents,
    text_files,
)
from stagewright.errors import DataError
from stagewright.schema import Saved, schema

_ABOUT = "tokens.json"


@schema(error=DataError)
class About(Saved):
    """What a folder of tokens is made of."""

    FORMAT: ClassVar[str] = "stagewright.tokens"
    ERROR: ClassVar[type[DataError]] = DataError

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    """Of the files in bytes."""
    tokenizer: str
    fingerprint: str
    """Of the tokenizer."""
    on_corrupt: str = "stop"
    bits: int
    padding: int
    end: int | None = None
    """The token that ends a document."""
    mask: int | None = None
    """The token that stands for a hidden one."""
    special: tuple[int, ...] = ()
    """Tokens that are no text."""
    words: int = 0
    """How many tokens the tokenizer knows."""
    num_documents: int = 0
    num_tokens: int = 0
    largest: int = 0
    """The largest token."""
    faults: tuple[str, ...] = ()
    """A sentence for each line that was left out."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a folder, mapped into memory."""

    folder: Path
    about: About
    ids: NDArray[Any]
    starts: Indices
    """The first token of each document, and one past the last of all."""
    places: Indices
    """File and line of each document."""
    ignored: Indices
    """Runs of tokens that do not count: first, one past the last."""

    @property
    def lengths(self) -> Indices:
        """The tokens of each document."""
        return np.diff(self.starts)

    def where(self, document: int) -> str:
        """Where a document stands."""
        file, line = self.places[document].tolist()
        return f"{self.about.files[file]}, line {line}"

    def counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens start … stop − 1 count."""
        made = np.ones(stop - start, dtype=bool)
        first = int(np.searchsorted(self.ignored[:, 1], start, side="right"))
        last = int(np.searchsorted(self.ignored[:, 0], stop))
        for begin, end in self.ignored[first:last].tolist():
            made[max(begin - start, 0) : max(end - start, 0)] = False
        return made


def open_tokens(folder: str | Path) -> Tokens:
    """The tokens in a folder that `stagewright data tokens` has made."""
    folder = Path(folder)
    if not (folder / _ABOUT).exists():
        begun = (folder / "progress.jsonl").exists()
        raise DataError(
            f"{folder} holds {'tokens that are not complete' if begun else f'no {_ABOUT}'}",
            f"{'go on' if begun else 'make it'} with `stagewright data tokens TEXT {folder} --tokenizer MODEL`",
        )
    about = About.load(folder / _ABOUT)
    ids, documents, ignored = (_mapped(folder / name, row) for name, row in _formats(about).items())
    if len(ids) != about.num_tokens or len(documents) != about.num_documents:
        raise DataError(
            f"{folder} holds {len(ids):,} tokens of {len(documents):,} documents, and its {_ABOUT} says "
            f"{about.num_tokens:,} of {about.num_documents:,}",
            "its files were cut off or mixed up: make it again",
        )
    return Tokens(folder, about, ids, np.append(documents[:, 0], len(ids)), documents[:, 1:], ignored)


def _formats(about: About) -> dict[str, np.dtype[Any]]:
    """What a row is in each file."""
    return {
        "tokens.bin": np.dtype(f"u{about.bits // 8}"), "documents.bin": np.dtype((np.int64, 3)),
        "ignored.bin": np.dtype((np.int64, 2)),
    }  # fmt: skip


def _mapped(path: Path, row: np.dtype[Any]) -> NDArray[Any]:
    """A file of rows of numbers, mapped into memory; an empty one cannot be."""
    try:
        shape = (path.stat().st_size // row.itemsize, *row.shape)
        return np.memmap(path, row.base, "r", shape=shape) if shape[0] else np.empty(shape, row.base)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "make the folder again") from error


def make_tokens(
    source: str | Path, folder: Path, tokenizer: Tokenizer, *, on_corrupt: OnCorrupt = "stop",
    progress: Callable[[int], None] = lambda done: None,
) -> Tokens:  # fmt: skip
    """Tokenizes the text at a path into a folder, or goes on where it was left; `progress` gets the bytes read."""
    files = text_files(source)
    about = About(
        files=tuple(map(str, files)), sizes=tuple(file.stat().st_size for file in files), tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint, on_corrupt=on_corrupt, bits=16 if tokenizer.size <= 1 << 16 else 32,
        padding=tokenizer.padding, end=tokenizer.end, mask=tokenizer.mask, special=tokenizer.special,
        words=tokenizer.size,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _ABOUT).exists():
        _check_same(about, About.load(folder / _ABOUT), folder)
        return open_tokens(folder)
    with _Writing(folder, about) as writing:
        for number in range(writing.done.file, len(files)):
            before, size = sum(about.sizes[:number]), 0
            skip = writing.done.line if number == writing.done.file else 0
            for piece in _pieces(read_documents(files[number], on_corrupt, skip)):
                writing.add(number, piece, tokenizer)
                size += sum(len(each) for _, each in piece if isinstance(each, Document))
                progress(before + min(size, about.sizes[number]))
            writing.note(number + 1, 0)
            progress(before + about.sizes[number])
        writing.finish(source)
    return open_tokens(folder)


def _check_same(wanted: About, found: About, folder: Path) -> None:
    for name in ("files", "sizes", "fingerprint", "on_corrupt"):
        if getattr(wanted, name) != getattr(found, name):
            what = {"fingerprint": "with another tokenizer", "on_corrupt": "with another --on-corrupt"}
            raise DataError(f"{folder} was made {what.get(name, 'of other text')}", "give another folder, or remove it")


_Line: TypeAlias = tuple[int, Document | DataError]


def _pieces(lines: Iterable[_Line], most: int = 1000, characters: int = 4_000_000) -> Iterator[list[_Line]]:
    """Lines, as many at a time as are tokenized at once."""
    piece: list[_Line] = []
    size = 0
    for line, found in lines:
        piece.append((line, found))
        size += len(found) if isinstance(found, Document) else 0
        if size >= characters or len(piece) >= most:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@dataclass
class _Done:
    """How far a folder has come: the file that is being read, its lines that are done, and what is written."""

    file: int = 0
    line: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_ignored: int = 0
    largest: int = 0


class _Writing:
    """A folder of tokens while it is being made."""

    def __init__(self, folder: Path, about: About) -> None:
        self.folder, self.about, self.done = folder, about, _Done()
        self.faults: list[str] = []
        self._log, self._formats = folder / "progress.jsonl", _formats(about)
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> _Writing:
        self._resume()
        rows = (self.done.num_tokens, self.done.num_documents, self.done.num_ignored)
        for (name, row), number in zip(self._formats.items(), rows):
            file = self._files[name] = (self.folder / name).open("a+b")
            file.truncate(number * row.itemsize)
        return self

    def __exit__(self, *fault: object) -> None:
        for file in self._files.values():
            file.close()

    def _resume(self) -> None:
        """Goes on after the last whole line of the progress, if it is that of the same text."""
        lines = self._log.read_bytes().split(b"\n")[:-1] if self._log.exists() else []
        if not lines:
            lines = [json.dumps(self.about.to_dict()).encode()]
        _check_same(self.about, About.from_dict(json.loads(lines[0])), self.folder)
        for line in lines[1:]:
            told = json.loads(line)
            self.faults += told.pop("faults")
            self.done = _Done(**told)
        self._log.write_bytes(b"\n".join([*lines, b""]))

    def add(self, number: int, piece: Sequence[_Line], tokenizer: Tokenizer) -> None:
        """Writes the documents of some lines of a file, and notes that they are there."""
        documents = [each for _, each in piece if isinstance(each, Document)]
        made = iter(tokenizer.tokenize(documents))
        faults: list[str] = []
        for line, found in piece:
            tokenized = next(made) if isinstance(found, Document) else found
            if isinstance(tokenized, Tokenized):
                self._write(number, line, tokenized)
            elif self.about.on_corrupt == "stop":
                raise tokenized
            else:
                faults.append(tokenized.what)
        self.note(number, piece[-1][0], faults)

    def _write(self, number: int, line: int, document: Tokenized) -> None:
        done, start = self.done, self.done.num_tokens
        ignored = [(first + start, stop + start) for first, stop in document.ignored]
        for (name, row), values in zip(self._formats.items(), (document.ids, [start, number, line], ignored)):
            self._files[name].write(np.array(values, dtype=row.base).tobytes())
        done.largest = max(done.largest, *document.ids, 0)
        done.num_tokens, done.num_documents = start + len(document.ids), done.num_documents + 1
        done.num_ignored += len(ignored)

    def note(self, file: int, line: int, faults: Sequence[str] = ()) -> None:
        """Adds a line to the progress, once what it tells of is written."""
        for each in self._files.values():
            each.flush()
        self.done.file, self.done.line = file, line
        self.faults += faults
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({**vars(self.done), "faults": faults}) + "\n")

    def finish(self, source: str | Path) -> None:
        """Writes what the folder is made of."""
        done = self.done
        if not done.num_tokens:
            skipped = f" ({len(self.faults):,} lines were skipped)" if self.faults else ""
            raise DataError(f"{source} holds no text{skipped}", "give a file with words in it")
        replace(
            self.about, num_documents=done.num_documents, num_tokens=done.num_tokens, largest=done.largest,
            faults=tuple(self.faults),
        ).save(self.folder / _ABOUT)  # fmt: skip


def tokens_of_text(
    source: str | Path, tokenizer: str, *, on_corrupt: OnCorrupt = "stop",
    progress: Callable[[int], None] = lambda done: None,
) -> Tokens:  # fmt: skip
    """The tokens of the text at a path, made now, or by an earlier run of the same text and tokenizer.

    They lie in the user's cache folder, and one process of a machine makes them.
    """
    made = None if fingerprint(tokenizer) else find_tokenizer(tokenizer)
    known = made.fingerprint if made else fingerprint(tokenizer)
    files = text_files(source)
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(json.dumps([facts, known, on_corrupt]).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagewright" / "tokens" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _ABOUT).exists():
            make_tokens(source, folder, made or find_tokenizer(tokenizer), on_corrupt=on_corrupt, progress=progress)
        return open_tokens(folder)
