"""A worker's order as it is run: transfers of one microbatch together, receives ahead of their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action


def together(order: Iterable[Action]) -> Iterator[list[Action]]:
    """The actions one by one, but neighbouring transfers of one microbatch in one piece."""

    def same(action: Action) -> object:
        return action[:4] if action.kind in TRANSFERS else object()

    for _, group in groupby(order, key=same):
        yield list(group)


def receives_ahead(steps: Iterator[list[Action]], num_computes: int) -> Iterator[list[Action]]:
    """The same steps, with each receive drawn forward past that many compute actions."""
    window: deque[list[Action]] = deque()
    ahead = 0
    for step in steps:
        if step[0].kind in RECEIVES:
            yield step
            continue
        window.append(step)
        ahead += step[0].kind in COMPUTE
        while ahead > num_computes:
            ahead -= window[0][0].kind in COMPUTE
            yield window.popleft()
    yield from window
