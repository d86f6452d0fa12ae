"""What a simulated run did: every op, transfer and reduction with its times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from stagewright.schedule import Action
from stagewright.simulation.program import Code, Op

Cause = tuple[str, int]
"""What ended a wait: `transfer` or `reduction` by its place in the log, `worker` by number, `data` by host."""


class Done(NamedTuple):
    """An op that ran, and what it waited for last; None stands for the op before it."""

    op: Op
    action: Action
    batch: int
    start_s: float
    stop_s: float
    cause: Cause | None
    order: int
    """Grows from one action to the next, over all workers: nothing waits for what has a larger one."""

    @property
    def code(self) -> Code:
        """What the op is to the engine."""
        return self.op.code


class Moved(NamedTuple):
    """A transfer that arrived."""

    channel: int
    op: Op
    sent: Action
    """Its sending."""
    batch: int
    sent_s: float
    """When its source issued it."""
    posted_s: float
    """When its target did."""
    start_s: float
    stop_s: float

    @property
    def num_bytes(self) -> float:
        """How many bytes."""
        return self.op.num_bytes


PlainDone = tuple[Op, Action, int, float, float, Cause | None, int]
PlainMoved = tuple[int, Op, Action, int, float, float, float, float]
"""The fields without their names: there are very many, and few are ever looked at one by one."""


class Reduced(NamedTuple):
    """A bucket that was reduced."""

    stage: int
    batch: int
    bucket: int
    start_s: float
    stop_s: float
    last: int
    """The worker whose gradients came last."""


Entry = TypeVar("Entry")


class Mapped(Sequence[Entry]):
    """What a function makes of each of some values, made when it is looked at."""

    def __init__(self, make: Callable[[Any], Entry], values: Sequence[Any]) -> None:
        self.make, self.values = make, values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Entry]:
        return map(self.make, self.values)

    def __getitem__(self, number: Any) -> Any:
        found = self.values[number]
        return Mapped(self.make, found) if isinstance(number, slice) else self.make(found)


class _DoneColumns(NamedTuple):
    """All that took time on devices, one worker after the other, column by column."""

    ops: list[Op]
    actions: list[Action]
    batches: list[int]
    starts_s: list[float]
    stops_s: list[float]
    edges: list[slice]
    """Worker by worker where its part stands."""


class Log:
    """All that happened."""

    def __init__(self, done: list[list[PlainDone]], moved: list[PlainMoved], reduced: list[Reduced]) -> None:
        self.plain_done, self.plain_moved, self.reduced = done, moved, reduced
        self.done = [Mapped(Done._make, entries) for entries in done]
        """Worker by worker, in order: what took time on the device."""
        self.moved = Mapped(Moved._make, moved)
        """In the order of arrival."""

    @cached_property
    def done_columns(self) -> _DoneColumns:
        """`done` for whoever goes through all of it."""
        entries = list(chain.from_iterable(self.plain_done))
        ops, actions, batches, starts_s, stops_s = (Mapped(itemgetter(at), entries) for at in range(5))
        ends = list(accumulate(map(len, self.plain_done), initial=0))
        edges = list(map(slice, ends, ends[1:]))
        return _DoneColumns(list(ops), list(actions), list(batches), list(starts_s), list(stops_s), edges)

    @cached_property
    def moved_columns(self) -> Any:
        """A `Moved` whose fields are columns of all transfers, for whoever goes through all of them."""
        return Moved._make(zip(*self.plain_moved)) if self.plain_moved else Moved._make([()] * len(Moved._fields))
