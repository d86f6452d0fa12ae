"""Documents in text files: what is read, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.texts import write_lines

from stagewright.data.text import Document, read_documents, text_files
from stagewright.errors import DataError, StagewrightError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def documents(path: Path) -> list[Document]:
    return [found for _, found in read_documents(path, "stop") if isinstance(found, Document)]


def test_every_kind_of_line(tmp_path: Path) -> None:
    lines = [{"text": "abc", "id": 7}, "  ", {"prompt": "a", "completion": "b"}, {"messages": CHAT}]
    found = documents(write_lines(tmp_path / "a.jsonl", lines))
    assert [(each.kind, each.parts, each.line) for each in found] == [
        ("text", ("abc",), 1), ("completion", ("a", "b"), 3), ("messages", (CHAT,), 4),
    ]  # fmt: skip


def test_a_text_file_is_one_document_and_a_folder_is_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two\n\nlines")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"no text")
    found = [each for file in text_files(tmp_path) for each in documents(file)]
    assert [each.parts[0] for each in found] == ["one", "two\n\nlines"]


BAD = {
    '{"text": "a"': "line 2 is no JSON: Expecting ',' delimiter at column",
    '{"words": "a"}': 'line 2 holds words\nexpected "text", "messages", or "prompt" and "completion"',
    '["a"]': "line 2 holds a list",
    '{"text": 3}': "line 2 holds a int for its text",
    '{"text": " "}': "line 2 holds an empty text",
    '{"prompt": "a", "completion": ""}': "line 2 holds an empty completion",
    '{"messages": "hi"}': "line 2: its messages are no list",
    '{"messages": [{"role": "user", "content": "hi"}]}': "line 2: the assistant says nothing",
    "[" * 100_000: "line 2 is no JSON: it is nested too deeply",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:30])
def test_a_bad_line_is_named_and_may_be_skipped(line: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, line, {"text": "b"}])
    with pytest.raises(DataError) as refused:
        documents(path)
    assert f"{path}, {BAD[line]}" in str(refused.value)
    found = [each for _, each in read_documents(path, "skip")]
    assert [isinstance(each, DataError) for each in found] == [False, True, False]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"a\.txt is no UTF-8 text: byte 3 is 0xff"):
        documents(tmp_path / "a.txt")


def test_places_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    for path, said in ((tmp_path / "a.csv", "is no text file"), (tmp_path, "holds no text file"),
                       (tmp_path / "b", "does not exist")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            text_files(path)


def test_parquet_rows_are_read_as_lines_are(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, line 2 holds text"):
        documents(tmp_path / "a.parquet")
    found = [each for _, each in read_documents(tmp_path / "a.parquet", "skip") if isinstance(each, Document)]
    assert [(each.parts[0], each.line) for each in found] == [("one", 1), ("two", 3)]


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.data.source.is_there", lambda module: False)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(StagewrightError, match="needs pyarrow, which is not installed"):
        text_files(tmp_path)
