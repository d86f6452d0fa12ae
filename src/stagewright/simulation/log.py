"""What a simulated run did: every op, transfer and reduction with its times, and the spans that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from stagewright.record import Columns, Span, Spans
from stagewright.schedule import Action, Kind
from stagewright.simulation.program import Code, Op, Program


class Done(NamedTuple):
    """An op that ran, and what it waited for last: None stands for the op before it."""

    op: Op
    action: Action
    batch: int
    start_s: float
    stop_s: float
    cause: tuple[str, int] | None
    """What ended its wait: `transfer` or `reduction` by its place in the log, `worker` by number, `data` by host."""
    order: int
    """Grows from one action to the next, over all workers: nothing waits for what has a larger one."""

    @property
    def is_update(self) -> bool:
        return self.op.code is Code.UPDATE


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


class Reduced(NamedTuple):
    """A bucket that was reduced."""

    stage: int
    batch: int
    bucket: int
    start_s: float
    stop_s: float
    last: int
    """The worker whose gradients came last."""


_Entry = TypeVar("_Entry")


class _Mapped(Sequence[_Entry]):
    """What a function makes of each of some values, made when it is looked at."""

    def __init__(self, make: Callable[[Any], _Entry], values: Sequence[Any]) -> None:
        self.make, self.values = make, values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[_Entry]:
        return map(self.make, self.values)

    def __getitem__(self, number: Any) -> Any:
        found = self.values[number]
        return _Mapped(self.make, found) if isinstance(number, slice) else self.make(found)


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

    def __init__(self, done: list[list[Any]], moved: list[Any], reduced: list[Reduced]) -> None:
        # The fields without their names: there are very many, and few are ever looked at one by one.
        self.plain_done, self.plain_moved, self.reduced = done, moved, reduced
        self.done = [_Mapped(Done._make, entries) for entries in done]
        """Worker by worker, in order: what took time on the device."""
        self.moved = _Mapped(Moved._make, moved)
        """In the order of arrival."""

    @cached_property
    def done_columns(self) -> _DoneColumns:
        """`done` for whoever goes through all of it."""
        entries = list(chain.from_iterable(self.plain_done))
        ends = list(accumulate(map(len, self.plain_done), initial=0))
        columns = (list(map(itemgetter(at), entries)) for at in range(5))
        return _DoneColumns._make((*columns, list(map(slice, ends, ends[1:]))))

    @cached_property
    def moved_columns(self) -> Any:
        """A `Moved` whose fields are columns of all transfers, for whoever goes through all of them."""
        return Moved._make(zip(*self.plain_moved)) if self.plain_moved else Moved._make([()] * len(Moved._fields))

    def spans(self, program: Program) -> Spans:
        """Every action with its times, none made before it is read; transfers stand at both ends, reductions at every
        replica.
        """
        return Spans(self._computed(), *self._transferred(program), self._reduced_at(program.plan.workers))

    def _computed(self) -> Columns:
        _, actions, batches, starts_s, stops_s, edges = self.done_columns
        workers = [worker for worker, here in enumerate(edges) for _ in range(here.start, here.stop)]
        kinds, stages, microbatches = _columns_of(actions)
        return workers, kinds, stages, batches, microbatches, starts_s, stops_s, [-1] * len(actions)

    def _transferred(self, program: Program) -> Iterator[Columns]:
        channels, _, sent, batches, _, _, starts_s, stops_s = self.moved_columns
        sources, targets = (_Mapped([one[at] for one in program.channels].__getitem__, channels) for at in (0, 1))
        kinds, stages, microbatches = _columns_of(sent)
        yield sources, kinds, stages, batches, microbatches, starts_s, stops_s, targets
        receipts: _Mapped[str] = _Mapped(lambda action: _RECEIPTS[action.kind][0], sent)
        users: _Mapped[int] = _Mapped(lambda action: action.stage + _RECEIPTS[action.kind][1], sent)
        yield targets, receipts, users, batches, microbatches, starts_s, stops_s, sources

    def _reduced_at(self, workers: Sequence[Sequence[int]]) -> Columns:
        rows = (
            (worker, "G", stage, batch, -1, start_s, stop_s, bucket)
            for stage, batch, bucket, start_s, stop_s, _ in self.reduced
            for worker in workers[stage]
        )
        return tuple(zip(*rows)) or ((),) * len(Span._fields)


_RECEIPTS: Mapping[Kind, tuple[str, int]] = {Kind.SEND_FORWARD: ("RF", 1), Kind.SEND_BACKWARD: ("RB", -1)}
"""What the receipt of a sending is called, and how far away its stage is."""


def _columns_of(actions: Sequence[Action]) -> Columns:
    """Kinds, stages and microbatches of actions."""
    return tuple(_Mapped(attrgetter(field), actions) for field in ("kind.value", "stage", "microbatch"))
