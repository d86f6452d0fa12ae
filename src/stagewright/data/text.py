"""Documents in text files, in their order, and their tokens by the tokenizer that lies in a model's folder.

a .txt file                                  one document
{"text": "…"}                                one document, every token counts
{"prompt": "…", "completion": "…"}           the completion counts
{"messages": [{"role": …, "content": …}]}    a chat: what the assistant says counts
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.data.source import OnCorrupt, is_there, need
from stagewright.errors import DataError, UsageError

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_Span: TypeAlias = tuple[int, int]
_KINDS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",), "completion": ("prompt", "completion"), "text": ("text",),
}  # fmt: skip
"""The keys of each kind of document; where several are there, the first counts."""


@dataclass(frozen=True)
class Document:
    """One document: its text, prompt and completion, or messages; and where it stands."""

    kind: str
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
    given, ends = Path(path), ", ".join(_SUFFIXES)
    if given.is_file():
        if given.suffix not in _SUFFIXES:
            raise DataError(f"{given} is no text file", f"give one that ends in {ends}")
        found: tuple[Path, ...] = (given,)
    elif given.is_dir():
        found = tuple(sorted(file for file in given.rglob("*") if file.suffix in _SUFFIXES and file.is_file()))
    else:
        raise DataError(f"{given} does not exist", "give a text file, or a folder of them")
    if not found:
        raise DataError(f"{given} holds no text file", f"text files end in {ends}")
    if any(file.suffix == ".parquet" for file in found):
        need(f"{given}, which holds .parquet files,", "pyarrow")
    return found


def read_documents(path: Path, on_corrupt: OnCorrupt, skip: int = 0) -> Iterator[tuple[int, Document | DataError]]:
    """A file's lines after the first `skip`, each with its document, or with its fault where faults are skipped.

    Lines that hold nothing but spaces are left out.
    """
    for line, record in enumerate(_records(path), start=1):
        if line <= skip or (isinstance(record, bytes) and not record.strip()):
            continue
        try:
            yield line, _document(path, line, record)
        except DataError as fault:
            if on_corrupt == "stop":
                raise
            yield line, fault


def _records(path: Path) -> Iterator[Any]:
    """The bytes of a whole .txt file, of each line of JSON, or a mapping for each row of a .parquet file."""
    if path.suffix == ".txt":
        yield path.read_bytes()
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            yield from file
    else:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        try:
            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except arrow.ArrowException as error:
            first = str(error).splitlines()[0]
            raise DataError(f"{path} is no whole .parquet file: {first}", "fetch it again") from error


def _document(path: Path, line: int, record: Any) -> Document:
    where = f"{path}, line {line}"
    if isinstance(record, bytes):
        is_plain = path.suffix == ".txt"
        try:
            text = record.decode("utf-8")
        except UnicodeDecodeError as error:
            fault = f"byte {error.start:,} is {record[error.start]:#x}"
            raise DataError(f"{path if is_plain else where} is no UTF-8 text: {fault}") from error
        if is_plain:
            return Document("text", (text,), path, 1)
        record = _parsed(text, where)
    for kind, keys in _KINDS.items():
        if isinstance(record, Mapping) and all(record.get(key) is not None for key in keys):
            parts = tuple(record[key] for key in keys)
            _check_parts(parts, kind, where)
            return Document(kind, parts, path, line)
    held = ", ".join(map(str, record)) or "no key" if isinstance(record, Mapping) else f"a {type(record).__name__}"
    raise DataError(f"{where} holds {held}", 'expected "text", "messages", or "prompt" and "completion"')


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        told = getattr(error, "msg", None) or "it is nested too deeply"
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{where} is no JSON: {told}{at}", "correct it, or leave it out with --on-corrupt skip"
        ) from error


def _check_parts(parts: tuple[Any, ...], kind: str, where: str) -> None:
    if kind != "messages":
        wrong = [part for part in parts if not isinstance(part, str)]
        if wrong:
            raise DataError(f"{where} holds a {type(wrong[0]).__name__} for its text", "expected a string")
        if not any(part.strip() for part in parts[-1:]):
            raise DataError(f"{where} holds an empty {'text' if kind == 'text' else 'completion'}")
        return
    (messages,) = parts
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise DataError(f"{where}: its messages are no list of mappings", 'expected [{"role": …, "content": …}, …]')
    if not any(each.get("role") == "assistant" for each in messages):
        raise DataError(f"{where}: the assistant says nothing", 'add a message of the role "assistant"')


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tokenized:
    """A document's tokens, and those of them that do not count, as [start, stop) from its first."""

    ids: list[int]
    ignored: list[_Span]


_Encode: TypeAlias = Callable[[Sequence[str], bool], list[tuple[list[int], list[_Span]]]]
"""Texts, and whether special tokens are added → ids and the characters that each of them covers."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as far as training needs it."""

    name: str
    size: int
    """One more than the largest token that it can give."""
    end: int | None
    """The token that ends a document."""
    padding: int
    fingerprint: str
    encode: _Encode
    mask: int | None = None
    """The token that stands for a hidden one."""
    special: tuple[int, ...] = ()
    """Tokens that are no text: beginnings, ends, padding, masks."""
    render: Callable[[Sequence[Mapping[str, Any]], bool], str] | None = None
    """Messages, and whether the assistant is to answer → text; None where there is no template."""
    answers: Callable[[Sequence[Mapping[str, Any]]], tuple[list[int], list[int]]] | None = None
    """Messages → ids, and 1 for those that the template marks as the assistant's; None where it marks none."""

    def tokenize(self, documents: Sequence[Document]) -> list[Tokenized | DataError]:
        """The documents' tokens; for one that cannot be had, why."""
        plain = iter(self.encode([each.parts[0] for each in documents if each.kind == "text"], True))
        return [self._tokenized(each, plain) for each in documents]

    def _tokenized(self, document: Document, plain: Iterator[tuple[list[int], Any]]) -> Tokenized | DataError:
        try:
            if document.kind == "text":
                return Tokenized(self._ended(next(plain)[0]), [])
            return self._completion(*document.parts) if document.kind == "completion" else self._chat(document)
        except DataError as fault:
            return fault

    def _ended(self, ids: list[int]) -> list[int]:
        """The tokens with the one that ends a document last."""
        return ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]

    def _completion(self, prompt: str, completion: str) -> Tokenized:
        ((before, _),) = self.encode([prompt], True)
        if self.end is not None and before[-1:] == [self.end]:
            before = before[:-1]
        ((after, _),) = self.encode([completion], False)
        return Tokenized(self._ended([*before, *after]), [(0, len(before))] if before else [])

    def _chat(self, document: Document) -> Tokenized:
        if self.render is None:
            raise DataError(
                f"{document.where} is a chat, and the tokenizer of {self.name} has no chat template",
                "use the tokenizer of a model for chats (with transformers installed), or prompt and completion",
            )
        messages = document.parts[0]
        try:
            if self.answers is not None:
                ids, marks = self.answers(messages)
                return Tokenized(ids, _runs([not mark for mark in marks]))
            text, said = self._rendered(messages, document)
        except DataError:
            raise
        except Exception as error:  # whatever a template raises: wrong roles, missing keys
            raise DataError(f"{document.where}: the chat template refuses it: {error}") from error
        ((ids, places),) = self.encode([text], False)
        counted = [any(start <= a and b <= stop and a < b for start, stop in said) for a, b in places]
        return Tokenized(ids, _runs([not each for each in counted]))

    def _rendered(self, messages: Sequence[Mapping[str, Any]], document: Document) -> tuple[str, list[_Span]]:
        """A chat as text, and the characters that the assistant says."""
        assert self.render is not None
        text, said = self.render(messages, False), []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before, after = self.render(messages[:number], True), self.render(messages[: number + 1], False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        f"{document.where}: the chat template writes message {number + 1} in another way when others "
                        "follow, so that it is not known which tokens are the assistant's",
                        "mark them in the template with {% generation %} … {% endgeneration %}",
                    )
                said.append((len(before), len(after)))
        return text, said


def _runs(flags: Sequence[bool]) -> list[_Span]:
    """Where flags are set, as [start, stop)."""
    edges = [place for place, (a, b) in enumerate(zip([False, *flags], [*flags, False])) if a != b]
    return list(zip(edges[::2], edges[1::2]))


def find_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer in a folder, or of a model that transformers finds by its name."""
    folder = Path(name)
    if is_there("transformers"):
        return _of_transformers(name)
    if not (is_there("tokenizers") and (folder / "tokenizer.json").exists()):
        raise UsageError(
            f"the tokenizer of {name} needs transformers, which is not installed",
            "pip install transformers, or give a folder with a tokenizer.json and install tokenizers",
        )
    import tokenizers

    made, config = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), folder / "tokenizer_config.json"
    named = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    given = [named.get(key) for key in ("eos_token", "pad_token", "mask_token")]
    texts = [each["content"] if isinstance(each, dict) else each for each in given]
    end, padding, mask = (made.token_to_id(text) if text else None for text in texts)
    return _tokenizer(name, made, end, padding, mask)


def _of_transformers(name: str | Path) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoTokenizer

    made: Any
    try:
        made = AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # OSError, ValueError, KeyError, and what Rust raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"no tokenizer can be read from {name}: {first}",
            "give the folder of one with --tokenizer FOLDER: it holds a tokenizer.json",
        ) from error
    if not made.is_fast:
        raise DataError(f"the tokenizer of {name} has no tokenizer.json, and does not say which characters it covers")

    def render(messages: Sequence[Mapping[str, Any]], answers: bool) -> str:
        return str(made.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers))

    def answers(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        found = made.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    template = made.chat_template
    marks = template is not None and "generation %}" in str(template).replace("endgeneration %}", "")
    named = (made.eos_token_id, made.pad_token_id, made.mask_token_id)
    plain = _tokenizer(name, made.backend_tokenizer, *named, str(template))
    return replace(plain, render=render if template is not None else None, answers=answers if marks else None)


def _tokenizer(
    name: str | Path, made: Any, end: int | None, padding: int | None, mask: int | None, template: str = ""
) -> Tokenizer:
    """The tokenizer around one of the package tokenizers."""
    digest = fingerprint(name) or _digest(made.to_str().encode(), template.encode())
    made.no_truncation()
    made.no_padding()

    def encode(texts: Sequence[str], special: bool) -> list[tuple[list[int], list[_Span]]]:
        return [(each.ids, each.offsets) for each in made.encode_batch(list(texts), add_special_tokens=special)]

    return Tokenizer(
        name=str(name), size=made.get_vocab_size(), end=end, encode=encode,
        # What stands where there is no token never counts, so that any token would do.
        padding=next((token for token in (padding, end) if token is not None), 0),
        fingerprint=digest, mask=mask,
        special=tuple(sorted(id for id, token in made.get_added_tokens_decoder().items() if token.special)),
    )  # fmt: skip


def fingerprint(name: str | Path) -> str | None:
    """What changes whenever the files of a tokenizer do; None where `name` is no folder with a tokenizer.json."""
    files = [Path(name) / each for each in _FILES]
    if not files[0].is_file():
        return None
    return _digest(*(file.read_bytes() if file.is_file() else b"" for file in files))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
