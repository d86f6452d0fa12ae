"""Documents into tokens, by the tokenizer that lies in a model's folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.data.source import is_there
from stagewright.data.text import Document
from stagewright.errors import DataError, UsageError

Span: TypeAlias = tuple[int, int]
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_ANSWER = "{% generation %}"
"""How a template may mark what the assistant says."""


@dataclass(frozen=True)
class Tokenized:
    """A document's tokens, and those of them that do not count, as [start, stop) from its first."""

    ids: list[int]
    ignored: list[Span]


_Encode: TypeAlias = Callable[[Sequence[str], bool], list[tuple[list[int], list[Span]]]]
"""Texts, and whether special tokens are added → ids and the characters that each of them covers."""


@dataclass(frozen=True)
class Words:
    """A tokenizer as far as training needs it."""

    name: str
    size: int
    """One more than the largest token that it can give."""
    end: int | None
    """The token that ends a document."""
    padding: int
    fingerprint: str
    encode: _Encode
    render: Callable[[Sequence[Mapping[str, Any]], bool], str] | None
    """Messages, and whether the assistant is to answer → text; None where there is no template."""
    answers: Callable[[Sequence[Mapping[str, Any]]], tuple[list[int], list[int]]] | None
    """Messages → ids, and 1 for those that the template marks as the assistant's; None where it marks none."""

    def tokenize(self, documents: Sequence[Document]) -> list[Tokenized | DataError]:
        """The documents' tokens; for one that cannot be had, why."""
        plain = [each for each in documents if each.kind == "text"]
        made = dict(zip(map(id, plain), self.encode([each.parts[0] for each in plain], True)))
        return [self._one(each, made[id(each)][0] if each.kind == "text" else None) for each in documents]

    def _one(self, document: Document, ids: list[int] | None) -> Tokenized | DataError:
        try:
            if ids is not None:
                return Tokenized(self._ended(ids), [])
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

    def _rendered(self, messages: Sequence[Mapping[str, Any]], document: Document) -> tuple[str, list[Span]]:
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
                        f"mark them in the template with {_ANSWER} … {{% endgeneration %}}",
                    )
                said.append((len(before), len(after)))
        return text, said


def _runs(flags: Sequence[bool]) -> list[Span]:
    """Where flags are set, as [start, stop)."""
    edges = [place for place, (a, b) in enumerate(zip([False, *flags], [*flags, False])) if a != b]
    return list(zip(edges[::2], edges[1::2]))


def find_words(name: str | Path) -> Words:
    """The tokenizer in a folder, or of a model that transformers finds by its name."""
    folder = Path(name)
    if is_there("transformers"):
        return _of_transformers(name)
    if is_there("tokenizers") and (folder / "tokenizer.json").exists():
        return _of_tokenizers(folder)
    raise UsageError(
        f"the tokenizer of {name} needs transformers, which is not installed",
        "pip install transformers, or give a folder with a tokenizer.json and install tokenizers",
    )


def _of_transformers(name: str | Path) -> Words:
    """The tokenizer that transformers makes."""
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

    def encode(texts: Sequence[str], special: bool) -> list[tuple[list[int], list[Span]]]:
        if not texts:
            return []
        found = made(list(texts), add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        return list(zip(found["input_ids"], found["offset_mapping"]))

    def render(messages: Sequence[Mapping[str, Any]], answers: bool) -> str:
        return str(made.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers))

    def answers(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        found = made.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    template = made.chat_template
    marks = template is not None and "generation %}" in str(template).replace("endgeneration %}", "")
    end = made.eos_token_id
    return Words(
        name=str(name), size=len(made), end=end, padding=_padding(made.pad_token_id, end),
        fingerprint=fingerprint(name) or _digest(made.backend_tokenizer.to_str().encode(), str(template).encode()),
        encode=encode, render=render if template is not None else None, answers=answers if marks else None,
    )  # fmt: skip


def _of_tokenizers(folder: Path) -> Words:
    """The tokenizer in a tokenizer.json, without what transformers would add."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = {key: made.token_to_id(token) for key, token in _special_tokens(folder).items()}

    def encode(texts: Sequence[str], special: bool) -> list[tuple[list[int], list[Span]]]:
        found = made.encode_batch(list(texts), add_special_tokens=special)
        return [(each.ids, each.offsets) for each in found]

    end = named.get("eos_token")
    return Words(
        name=str(folder), size=made.get_vocab_size(), end=end, padding=_padding(named.get("pad_token"), end),
        fingerprint=str(fingerprint(folder)), encode=encode, render=None, answers=None,
    )  # fmt: skip


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder's configuration names."""
    path = folder / "tokenizer_config.json"
    plain = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    given = {key: plain.get(key) for key in ("eos_token", "pad_token")}
    return {key: each["content"] if isinstance(each, dict) else each for key, each in given.items() if each}


def _padding(padding: int | None, end: int | None) -> int:
    """What stands where there is no token: it never counts, so that any token would do."""
    return next((token for token in (padding, end) if token is not None), 0)


def fingerprint(name: str | Path) -> str | None:
    """What changes whenever the files of a tokenizer do; None where `name` is no folder with a tokenizer.json."""
    files = [Path(name) / each for each in _FILES]
    if not files[0].is_file():
        return None
    return _digest(*(file.read_bytes() if file.is_file() else b"" for file in files))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
