"""A folder of tokens: the same whether it was made in one go or not, with what counts and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.texts import TEMPLATE, ids, make_tokenizer, write_lines

from stagewright.data.text import Tokenizer, find_tokenizer
from stagewright.data.tokens import Tokens, make_tokens, open_tokens, tokens_of_text
from stagewright.errors import DataError

END, USER, ASSISTANT = 1, 30, 31
CHAT = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "x"}, {"role": "assistant", "content": "zz"},
]  # fmt: skip
CHAT_IDS = [USER, *ids("hi"), END, ASSISTANT, *ids("yo"), END, USER, *ids("x"), END, ASSISTANT, *ids("zz"), END]
ANSWERS = [*ids("yo"), END, *ids("zz"), END]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def words(tokenizer: Path) -> Tokenizer:
    return find_tokenizer(tokenizer)


def rows(tokens: Tokens) -> list[tuple[list[int], list[int]]]:
    """Each document's tokens, and those of them that count."""
    made = []
    for start, stop in zip(tokens.starts, tokens.starts[1:]):
        found = tokens.ids[start:stop]
        made.append((found.tolist(), found[tokens.counted(start, stop)].tolist()))
    return made


def test_what_counts_of_each_kind(words: Tokenizer, tmp_path: Path) -> None:
    lines = [{"text": "ab c"}, {"prompt": "ab", "completion": " c"}, {"messages": CHAT}]
    found = make_tokens(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "tokens", words)
    whole = [*ids("ab c"), END]
    assert rows(found) == [(whole, whole), (whole, [*ids(" c"), END]), (CHAT_IDS, ANSWERS)]
    assert [found.where(number) for number in range(3)] == [f"{tmp_path}/a.jsonl, line {n}" for n in (1, 2, 3)]
    assert (found.about.bits, found.about.padding, found.about.largest) == (16, 0, ASSISTANT)
    assert found.ids.dtype == np.uint16
    assert not found.counted(int(found.starts[2]) + 1, int(found.starts[2]) + 4).any()  # inside a longer run


def test_a_template_that_marks_the_answers_is_believed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    marked = TEMPLATE.replace(
        "{{ m['content'] }}<end>",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}<end>",
    )
    made = find_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=marked))
    source = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    assert rows(make_tokens(source, tmp_path / "tokens", made)) == [(CHAT_IDS, [*ids("yo"), *ids("zz")])]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses it: roles must alternate"),
        (
            "{% for m in messages %}{{ m['content'] if loop.last else '' }}{% endfor %}",
            "writes message 2 in another way",
        ),
    ],
)
def test_chats_that_a_template_does_not_take_are_named(template: str | None, said: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made = find_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=template))
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": CHAT}])
    with pytest.raises(DataError) as refused:
        make_tokens(source, tmp_path / "tokens", made)
    assert f"{source}, line 2" in str(refused.value)
    assert said in str(refused.value)
    skipped = make_tokens(source, tmp_path / "others", made, on_corrupt="skip")
    assert (skipped.about.num_documents, len(skipped.about.faults)) == (1, 1)


def test_a_tokenizer_json_alone_gives_the_same_tokens(words: Tokenizer, tokenizer: Path, tmp_path: Path) -> None:
    """What machines without transformers use."""
    source = write_lines(tmp_path / "a.jsonl", [{"text": "ab c"}, {"prompt": "ab", "completion": " c"}])
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from stagewright.data.text import find_tokenizer; from stagewright.data.tokens import make_tokens\n"
        f"make_tokens({str(source)!r}, __import__('pathlib').Path({str(tmp_path / 'alone')!r}), "
        f"find_tokenizer({str(tokenizer)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert rows(open_tokens(tmp_path / "alone")) == rows(make_tokens(source, tmp_path / "tokens", words))


class StopError(Exception):
    """What ends a preparation in the middle."""


def stopping(words: Tokenizer, after: int) -> Tokenizer:
    """A tokenizer that fails after so many calls."""
    left = iter(range(after))

    def encode(texts: Sequence[str], special: bool) -> Any:
        if texts and next(left, None) is None:
            raise StopError
        return words.encode(texts, special)

    return replace(words, encode=encode)


@pytest.mark.parametrize("torn", [False, True])
def test_a_preparation_that_was_stopped_goes_on(torn: bool, words: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for name in "abc":
        lines: list[Any] = [{"text": f"{name} {'z' * (number % 9)}"} for number in range(1500)]
        write_lines(source / f"{name}.jsonl", [*lines[:700], "{", *lines[700:]])
    whole = make_tokens(source, tmp_path / "whole", words, on_corrupt="skip")
    folder = tmp_path / "parts"
    for _ in range(2):
        with pytest.raises(StopError):
            make_tokens(source, folder, stopping(words, 2), on_corrupt="skip")
        if torn:  # what was being written when the machine went down
            for name in ("tokens.bin", "documents.bin", "ignored.bin", "progress.jsonl"):
                with (folder / name).open("ab") as file:
                    file.write(b"{\x01\x02\x03")
    with pytest.raises(DataError, match="holds tokens that are not complete"):
        open_tokens(folder)
    seen: list[int] = []
    found = make_tokens(source, folder, words, on_corrupt="skip", progress=seen.append)
    assert (found.folder / "tokens.bin").read_bytes() == (whole.folder / "tokens.bin").read_bytes()
    assert (found.folder / "documents.bin").read_bytes() == (whole.folder / "documents.bin").read_bytes()
    assert found.about == whole.about
    assert len(found.about.faults) == 3
    assert seen == sorted(seen)
    assert seen[-1] == sum(found.about.sizes)


def test_a_folder_belongs_to_its_text_and_its_tokenizer(words: Tokenizer, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    make_tokens(source, tmp_path / "tokens", words)
    make_tokens(source, tmp_path / "tokens", words)  # the same again is what is there
    for wrong, said in ((replace(words, fingerprint="other"), "with another tokenizer"), (words, "of other text")):
        if said == "of other text":
            write_lines(source, [{"text": "other"}])
        with pytest.raises(DataError, match=f"was made {said}\ngive another folder"):
            make_tokens(source, tmp_path / "tokens", wrong)


def test_files_that_were_cut_off_are_refused(words: Tokenizer, tmp_path: Path) -> None:
    made = make_tokens(write_lines(tmp_path / "a.jsonl", [{"text": "abc"}]), tmp_path / "tokens", words)
    os.truncate(made.folder / "tokens.bin", 4)
    with pytest.raises(DataError, match=r"holds 2 tokens of 1 documents, and its tokens\.json says 4"):
        open_tokens(made.folder)
    with pytest.raises(DataError, match=r"holds no tokens\.json\nmake it with `stagewright data tokens"):
        open_tokens(tmp_path)


def test_text_without_a_word_is_refused(words: Tokenizer, tmp_path: Path) -> None:
    for name, text in (("a.txt", " \n"), ("a.jsonl", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="holds no text\n"):
            make_tokens(tmp_path / name, tmp_path / f"{name}-tokens", words)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match=f"no tokenizer can be read from {tmp_path}"):
        find_tokenizer(tmp_path)


def test_tokens_on_the_way_are_made_once(
    words: Tokenizer, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_lines(tmp_path / "a.jsonl", [{"text": "abc"}])
    first = tokens_of_text(source, str(tokenizer))
    with monkeypatch.context() as patch:
        patch.setattr("stagewright.data.tokens.find_tokenizer", None)  # nobody needs a tokenizer any more
        assert tokens_of_text(source, str(tokenizer)).folder == first.folder
    write_lines(source, [{"text": "abd"}])
    assert tokens_of_text(source, str(tokenizer)).folder != first.folder
