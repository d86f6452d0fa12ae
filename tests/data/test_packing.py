"""Rows of tokens: how documents become rows, and which rows each batch has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.data.packing import TokenRows, bucket_lengths, pack, padded_to, permuted, rows_of_batch
from stagewright.data.tokens import About, Tokens
from stagewright.errors import DataError, UsageError


def tokens_of(*lengths: int, ignored: tuple[tuple[int, int], ...] = ()) -> Tokens:
    """Documents of these lengths whose tokens count on: 0 1 2 …"""
    number = sum(lengths)
    about = About(
        files=("a",), sizes=(0,), tokenizer="t", fingerprint="f", bits=16, padding=0, num_tokens=number,
        num_documents=len(lengths),
    )  # fmt: skip
    places = np.array([(0, line + 1) for line in range(len(lengths))], dtype=np.int64).reshape(-1, 2)
    return Tokens(
        Path("."), about, np.arange(number, dtype=np.uint16), np.cumsum([0, *lengths], dtype=np.int64), places,
        np.array(ignored, dtype=np.int64).reshape(-1, 2),
    )  # fmt: skip


def shown(rows: TokenRows) -> list[list[int]]:
    return [rows.read(position)[0].tolist() for position in range(len(rows))]


def test_documents_joined_apart_and_off() -> None:
    tokens = tokens_of(2, 5, 3, 1)
    assert shown(pack(tokens, 4, "join")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shown(pack(tokens, 4, "documents")) == [[0, 1], [2, 3, 4, 5], [7, 8, 9]]  # 6 and 10 alone teach nothing
    assert shown(pack(tokens, 5, "off")) == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]


def test_what_does_not_count_stays_so_in_every_row() -> None:
    tokens = tokens_of(4, 4, ignored=((0, 1), (3, 6)))
    joined = pack(tokens, 3, "join")
    assert [joined.read(row)[1].tolist() for row in range(2)] == [[False, True, True], [False] * 3]
    assert shown(pack(tokens, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # by itself each has its own row
    assert shown(pack(tokens_of(4, 4), 3)) == [[0, 1, 2], [3, 4, 5]]  # and where all count they are joined


def test_a_row_longer_than_the_sequence_is_named_or_left_out() -> None:
    tokens = tokens_of(2, 5, 3, 6)
    with pytest.raises(DataError, match=r"a, line 2 has 5 tokens, and a row has 4 \(2 of 4 documents are longer\)"):
        pack(tokens, 4, "off")
    rows = pack(tokens, 4, "off", on_corrupt="skip")
    assert shown(rows) == [[0, 1], [7, 8, 9]]
    assert rows.faults == ("2 of 4 documents are longer than 4 tokens",)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="3 tokens are not one row of 4"):
        pack(tokens_of(3), 4)
    with pytest.raises(UsageError, match="a row of 1 token"):
        pack(tokens_of(3), 1)


@given(st.integers(1, 400), st.integers(0, 5), st.integers(0, 5))
def test_a_random_order_has_every_place_once_and_asks_for_no_other(num: int, seed: int, epoch: int) -> None:
    whole = permuted(np.arange(num), num, seed=seed, use="test", epoch=epoch)
    assert sorted(whole.tolist()) == list(range(num))
    some = np.array([num - 1, 0])
    assert permuted(some, num, seed=seed, use="test", epoch=epoch).tolist() == whole[some].tolist()


def test_random_orders_look_random() -> None:
    orders = [permuted(np.arange(1000), 1000, seed=seed, use="test", epoch=0) for seed in range(3)]
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.15
    assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.15
    assert np.abs(np.diff(orders[2])).mean() > 200


@pytest.mark.parametrize("windows", [None, 3])
def test_an_epoch_has_every_row_once(windows: int | None) -> None:
    lengths = [2 + (7 * number) % 11 for number in range(50)]
    rows = pack(tokens_of(*lengths), 12, "off")
    epochs = [
        [rows_of_batch(rows, batch, size=4, seed=1, windows=windows).tolist() for batch in range(12 * n, 12 * n + 12)]
        for n in range(2)
    ]
    for epoch in epochs:
        assert len({row for batch in epoch for row in batch}) == 48
    assert epochs[0] != epochs[1]
    if windows:
        spread = [np.ptp(rows.lengths(np.array(batch))) for batch in epochs[0]]
        assert max(spread) < np.ptp(lengths)
        longest = [int(rows.lengths(np.array(batch)).max()) for batch in epochs[0]]
        assert longest[:3] != sorted(longest[:3]) or longest[3:6] != sorted(longest[3:6])


def test_a_split_is_disjoint_and_complete() -> None:
    rows = pack(tokens_of(*[3] * 40), 3, "off")
    train, held_out = rows.split(0.1)
    assert (len(train), len(held_out)) == (36, 4)
    together = [*shown(train), *shown(held_out)]
    assert sorted(together) == shown(rows)
    assert shown(held_out) != shown(rows)[-4:]
    for share in (0.001, 0.999):
        with pytest.raises(UsageError, match=f"--validation {share:g} of 40 rows is (0|40)"):
            rows.split(share)


def test_lengths_that_rows_are_padded_to() -> None:
    assert bucket_lengths(100, 4) == (32, 56, 80, 100)
    assert bucket_lengths(512, 4) == (128, 256, 384, 512)
    assert bucket_lengths(10, 4) == (8, 10)
    assert bucket_lengths(512, 1) == (512,)
    assert padded_to([3, 57], (32, 56, 80)) == 80
