"""The order of an epoch: every image once, the same for the same seed, near its file for records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from stagewright.data.order import Draw, _shuffle_buffer, draw_bits, draw_uniform, epoch_order
from stagewright.errors import UsageError


class Rows(SimpleNamespace):
    """As much of a dataset as its order needs."""

    def __len__(self) -> int:
        return int(self.num)


def rows(num: int, files: tuple[int, ...] = ()) -> Any:
    return Rows(num=num, file_starts=files)


@given(
    num=some.integers(0, 300),
    files=some.integers(0, 7),
    seed=some.integers(0, 2**63),
    epoch=some.integers(0, 1000),
    buffer=some.integers(1, 400),
    shuffle=some.booleans(),
)
def test_every_image_comes_exactly_once(
    num: int, files: int, seed: int, epoch: int, buffer: int, shuffle: bool
) -> None:
    starts = tuple(sorted({num * file // files for file in range(files)})) if num else ()
    order = epoch_order(rows(num, starts), seed=seed, epoch=epoch, buffer=buffer, shuffle=shuffle)
    assert sorted(order.tolist()) == list(range(num))


def test_the_order_is_one_of_seed_and_epoch() -> None:
    orders = [epoch_order(rows(50), seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert epoch_order(rows(50), seed=0, epoch=0).tolist() == orders[0]
    assert all(a != b for place, a in enumerate(orders) for b in orders[:place])


def test_the_order_is_fixed_for_all_time() -> None:
    """A run resumed years later, on another numpy, goes on in the same order."""
    assert epoch_order(rows(10), seed=0, epoch=0).tolist() == [3, 7, 2, 4, 8, 5, 9, 1, 0, 6]


def test_unshuffled_is_as_it_lies() -> None:
    assert epoch_order(rows(5, (0, 2)), seed=3, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_buffer_of_one_leaves_files_whole() -> None:
    order = epoch_order(rows(12, (0, 4, 8)), seed=1, epoch=0, buffer=1)
    assert sorted(tuple(order[at : at + 4]) for at in (0, 4, 8)) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_a_row_leaves_the_buffer_no_sooner_than_it_can_enter() -> None:
    order = _shuffle_buffer(np.arange(500), 20, seed=0, epoch=0)
    assert all(row < step + 20 for step, row in enumerate(order))
    assert order.tolist() != list(range(500))


@given(num=some.integers(0, 60), buffer=some.integers(1, 70), seed=some.integers(0, 99))
def test_the_sort_equals_the_loop_it_stands_for(num: int, buffer: int, seed: int) -> None:
    source = iter(range(num))
    held = [row for row, _ in zip(source, range(buffer))] if num > buffer else list(range(num))
    source = iter(range(len(held), num))
    slots = draw_bits(seed, 5, Draw.SLOTS, num=max(0, num - buffer))[0] % np.uint64(max(1, min(buffer, num)))
    out = []
    for slot, row in zip(slots.tolist(), source):
        out.append(held[slot])
        held[slot] = row
    order = _shuffle_buffer(np.arange(num), buffer, seed=seed, epoch=5).tolist()
    assert order[: len(out)] == out
    assert sorted(order[len(out) :]) == sorted(held)


def test_draws_are_even_and_do_not_depend_on_the_company() -> None:
    many = draw_uniform(7, 3, np.arange(20_000), num=3)
    assert abs(many.mean(axis=0) - 0.5).max() < 0.01
    assert abs(np.corrcoef(many.T) - np.eye(3)).max() < 0.03
    assert (draw_uniform(7, 3, 1234, num=3)[0] == many[1234]).all()


@pytest.mark.parametrize(
    ("options", "says"), [({"epoch": -1}, "epoch -1"), ({"buffer": 0}, "of 0 rows"), ({"seed": -1}, "-1")]
)
def test_orders_that_cannot_be_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        epoch_order(rows(5, (0,)), **{"seed": 0, "epoch": 0, **options})
