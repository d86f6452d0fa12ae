"""What one run did: a simulation, a rehearsal and a training run all return this."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from math import inf
from operator import le
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import (
    Field,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)

from stagewright.errors import RecordError, StagewrightError
from stagewright.memory import StageBytes
from stagewright.plan import Plan
from stagewright.schema import Saved, schema

Source = Literal["simulated", "rehearsed", "measured"]

MEMORY_KINDS = StageBytes._fields
"""What memory consists of, in the order in which reports stack it."""


class Span(NamedTuple):
    """A timed action: `F` of microbatch 3 of batch 0 in stage 1, from start to stop."""

    worker: int
    kind: str
    """The action's kind, as in schedules: F, B, I, W, SF, RF, SB, RB, G, A, U …; `data` is loading."""
    stage: int
    batch: int
    microbatch: int
    start_s: float
    stop_s: float
    peer: int = -1
    """The other worker of a transfer, or the bucket of a reduction."""


Columns = tuple[Collection[Any], ...]
"""Spans field by field, in the order of `Span`."""


class Spans(Sequence[Span]):
    """Spans that stand in columns, group after group, and become a tuple when the first of them is read.

    A simulation has half a million: to make them would take a fifth of its time, and few runs are ever drawn.
    """

    def __init__(self, *groups: Columns) -> None:
        for group in groups:
            lengths = {field: len(column) for field, column in zip(Span._fields, group, strict=True)}
            if len(set(lengths.values())) > 1:
                raise RecordError(f"key spans has columns of unequal lengths: {lengths}")
        self.groups = groups

    @cached_property
    def made(self) -> tuple[Span, ...]:
        """All of them, made without a line of Python for each."""
        rows = chain.from_iterable(zip(*group) for group in self.groups)
        return cast(tuple[Span, ...], tuple(map(tuple.__new__, repeat(Span), rows)))

    def __len__(self) -> int:
        return sum(len(group[0]) for group in self.groups)

    def __getitem__(self, index: Any) -> Any:
        return self.made[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return self.made == (other.made if isinstance(other, Spans) else other)

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return repr(self.made)

    def __reduce__(self) -> tuple[type[tuple[Span, ...]], tuple[tuple[Span, ...]]]:
        # A copy elsewhere has nothing to make them of.
        return tuple, (self.made,)


def _checked_spans(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Spans as they are: looking at each field of each would take longer than the simulation that made them."""
    if isinstance(value, list):
        value = tuple(tuple(each) if isinstance(each, list) else each for each in value)
    is_made = isinstance(value, Spans) or (isinstance(value, tuple) and set(map(type, value)) <= {Span})
    return value if is_made else check(value)


def _written_spans(value: Sequence[Span], write: SerializerFunctionWrapHandler) -> object:
    return write(tuple(value))


_SpanTuple = Annotated[tuple[Span, ...], WrapValidator(_checked_spans), WrapSerializer(_written_spans)]
"""How spans are checked and written, whichever way they are kept."""


@schema(error=RecordError)
class DeviceUse:
    """What one device did and held."""

    device: str
    """As in placements: `0:3`."""
    stages: tuple[int, ...]
    busy_share: float = Field(ge=0, le=1.000001)
    """The share of the steady steps' time in which it computed."""
    peak_bytes: int = Field(ge=0)
    peak_parts: Mapping[str, int] = Field(default_factory=dict)
    """What the peak consists of, by the kinds in MEMORY_KINDS."""
    driver_bytes: int | None = Field(default=None, ge=0)
    """What the driver showed for the device, where one was asked; for a CPU worker, what the kernel did."""
    driver_share: float | None = Field(default=None, ge=0, le=1.000001)
    """The mean utilisation that the driver, or the kernel, showed while the device was in use."""
    memory_s: tuple[float, ...] = ()
    memory_parts: Mapping[str, tuple[int, ...]] = Field(default_factory=dict)
    """Memory over time: for each kind the bytes at each of `memory_s`."""

    def __post_init__(self) -> None:
        for kind, values in self.memory_parts.items():
            if len(values) != len(self.memory_s):
                raise RecordError(
                    f"device {self.device}: key memory_parts.{kind} holds {len(values)} values, but memory_s holds "
                    f"{len(self.memory_s)}"
                )


@schema(error=RecordError)
class Point:
    """One figure on a curve: the loss after a step, the accuracy after an epoch."""

    name: str
    step: int = Field(ge=0)
    epoch: float = Field(ge=0)
    value: float
    seconds: float = Field(default=0.0, ge=0)


@schema(error=RecordError)
class Record(Saved):
    """One run, with what is needed to compare and to draw it."""

    FORMAT: ClassVar[str] = "stagewright.record"
    VERSION: ClassVar[int] = 2
    RENAMED: ClassVar[Mapping[str, str]] = {"epoch_images": "epoch_samples", "step_images": "step_samples"}
    ERROR: ClassVar[type[StagewrightError]] = RecordError

    name: str
    source: Source
    plan: Plan
    cluster: str
    precision: str = "fp32"
    data: str = "synthetic"
    epoch_samples: int | None = Field(default=None, ge=1)
    """How many samples an epoch has, where the data has epochs."""
    step_s: tuple[float, ...]
    """Seconds of each steady step, warm-up and start-up left out; none where a resumed run had no step left to do."""
    step_samples: int = Field(ge=1)
    """Samples that one step really processed."""
    sample_name: Literal["images", "samples"] = "samples"
    """What a sample is called."""
    sample_tokens: float | None = Field(default=None, gt=0)
    """Tokens of a sample, on average, where samples are text."""
    start_up_s: float = Field(default=0.0, ge=0)
    """Time before the steady state."""
    devices: tuple[DeviceUse, ...] = ()
    spans: Annotated[Sequence[Span], GetPydanticSchema(lambda _, schema_of: schema_of(_SpanTuple))] = ()
    points: tuple[Point, ...] = ()
    limit: str = ""
    """What limited the run, in words."""
    command: str = ""
    environment: Mapping[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.step_s, default=1.0) <= 0:
            raise RecordError(f"key step_s holds {min(self.step_s)}: expected positive seconds")
        if self.spans:
            self._check_spans()

    def _check_spans(self) -> None:
        # Column by column, without a line of Python for each span: there may be half a million.
        workers = len(self.plan.devices)
        for group in self.spans.groups if isinstance(self.spans, Spans) else [tuple(zip(*self.spans))]:
            columns = dict(zip(Span._fields, group))
            if any(not 0 <= worker < workers for worker in set(columns["worker"])):
                wrong = next(span for span in self.spans if not 0 <= span.worker < workers)
                raise RecordError(f"span {wrong.kind} names worker {wrong.worker}: the plan has {workers}")
            if not all(map(le, columns["start_s"], columns["stop_s"])):
                wrong = next(span for span in self.spans if not span.start_s <= span.stop_s)
                raise RecordError(
                    f"span {wrong.kind} of worker {wrong.worker} stops at {wrong.stop_s} before it starts"
                )

    @cached_property
    def median_step_s(self) -> float:
        """The median of the steady steps; infinite where there were none."""
        return median(self.step_s) if self.step_s else inf

    @property
    def samples_per_s(self) -> float:
        """Samples really processed, over the median step."""
        return self.step_samples / self.median_step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens really processed, over the median step, where samples are text."""
        return None if self.sample_tokens is None else self.samples_per_s * self.sample_tokens

    @property
    def epoch_s(self) -> float | None:
        """Seconds for an epoch's samples, where the data has epochs and a step was measured."""
        return None if self.epoch_samples is None or not self.step_s else self.epoch_samples / self.samples_per_s

    def summary(self) -> dict[str, object]:
        """The figures that `--json` prints."""
        return {
            "name": self.name, "source": self.source, "model": self.plan.model, "placement": self.plan.placement,
            "images_per_s": self.samples_per_s if self.step_s else None,
            **({"tokens_per_s": self.tokens_per_s} if self.sample_tokens and self.step_s else {}),
            "step_s": self.median_step_s if self.step_s else None, "epoch_s": self.epoch_s,
            "devices": [
                {"device": use.device, "peak_bytes": use.peak_bytes, "busy_share": use.busy_share}
                for use in self.devices
            ],
        }  # fmt: skip
