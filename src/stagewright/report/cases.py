"""Records as cases: one setting, all its repetitions, and the figures that tables and charts show of it.

A folder of results is read at any depth:

    out/
      cluster.yaml                  the hardware, for the drawing (also NAME.cluster.yaml)
      vgg16-7-1.1.record.json       ┐ one case, two repetitions: the same name inside, files that differ
      vgg16-7-1.2.record.json       ┘
      vgg16-7-1.1.log               shown as the log of the record beside it (also .zip)
      vgg16-dp.failure.json         a case that gave no record, with its reason
      tiny/record.json              what `train -o out/tiny` leaves: a case of its own, called tiny
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from stagewright.cluster import Cluster
from stagewright.errors import FileError, RecordError, StagewrightError, UsageError
from stagewright.plan import Plan, parse_staleness
from stagewright.record import DeviceUse, Record, Source
from stagewright.report.figures import rate
from stagewright.schema import Saved, schema

RECORD_END, FAILURE_END = ".record.json", ".failure.json"
_RUN_RECORD = "record.json"
"""What a run leaves in its own folder."""
SOURCES: tuple[Source, ...] = ("measured", "rehearsed", "simulated")
"""The strongest evidence first."""
WHERE_TIME_GOES = ("critical path:", "reduce among ")
"""How a simulation's notes begin that explain its timeline, and are shown with it."""


@schema(error=RecordError)
class Failure(Saved):
    """A case that gave no record, and why."""

    FORMAT: ClassVar[str] = "stagewright.failure"
    ERROR: ClassVar[type[StagewrightError]] = RecordError

    name: str
    reason: str
    model: str = ""
    placement: str = ""
    source: Source = "measured"
    """What the case was to be."""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting and its repetitions, which all did the same work under the same plan."""

    records: tuple[Record, ...]
    files: tuple[Path | None, ...]

    @cached_property
    def record(self) -> Record:
        """The repetition in the middle, which stands for the case in drawings."""
        ranked = sorted(self.records, key=lambda record: record.samples_per_s)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def name(self) -> str:
        """The case's name."""
        return self.records[0].name

    @property
    def plan(self) -> Plan:
        """The plan that all repetitions ran."""
        return self.records[0].plan

    @property
    def source(self) -> Source:
        """Simulated, rehearsed or measured."""
        return self.records[0].source

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Samples a second of each repetition, in the order in which they ran."""
        return tuple(record.samples_per_s for record in self.records)

    @property
    def samples_per_s(self) -> float:
        """The median of the repetitions."""
        return median(self.rates)

    def speed(self, samples_per_s: float | None = None) -> str:
        """`1,488 samples/s`, its own or others beside it; `190,464 tokens/s` where its samples are text."""
        value, tokens = self.samples_per_s if samples_per_s is None else samples_per_s, self.record.sample_tokens
        return f"{rate(value)} samples/s" if tokens is None else f"{rate(value * tokens)} tokens/s"

    @property
    def step_s(self) -> float:
        """The median step of the repetitions."""
        return median(record.median_step_s for record in self.records)

    @property
    def epochs_s(self) -> tuple[float, ...]:
        """Seconds of an epoch in each repetition, where the data has epochs."""
        return tuple(record.epoch_s for record in self.records if record.epoch_s is not None)

    @property
    def num_devices(self) -> int:
        """How many devices the plan uses."""
        return len(self.plan.devices)

    @property
    def rows_per_device(self) -> float:
        """The rows of one replica of the first stage."""
        return self.plan.batch / self.plan.replicas[0]

    @cached_property
    def stage_uses(self) -> tuple[DeviceUse | None, ...]:
        """For each stage the device that held most, over all repetitions."""
        uses = [use for record in self.records for use in record.devices]
        stages = range(len(self.plan.stages))
        found = ([use for use in uses if stage in use.stages] for stage in stages)
        return tuple(max(those, key=lambda use: use.peak_bytes, default=None) for those in found)

    @property
    def busiest_share(self) -> float:
        """The busy share of the busiest device; 0 where no device was watched."""
        return max((use.busy_share for use in self.record.devices), default=0.0)

    @property
    def limit_samples_per_s(self) -> float | None:
        """Samples a second if the busiest device never waited."""
        share = min(self.busiest_share, 1.0)
        return self.samples_per_s / share if share > 0 else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a report is made from."""

    cases: tuple[Case, ...]
    failures: tuple[Failure, ...] = ()
    clusters: tuple[Cluster, ...] = ()


def make_cases(records: Iterable[Record], files: Iterable[Path | None] = ()) -> tuple[Case, ...]:
    """Cases in the order of their first record; what differs in name, source, plan or work is another case.

    A record without a step is of no case.
    """
    groups: dict[object, list[tuple[Record, Path | None]]] = {}
    remaining = iter(files)
    for record in records:
        file = next(remaining, None)
        if record.step_s:
            groups.setdefault(_case_key(record), []).append((record, file))
    return tuple(
        Case(records=tuple(record for record, _ in pairs), files=tuple(file for _, file in pairs))
        for pairs in groups.values()
    )


def in_order(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Cases of one work and then of one name together, the strongest evidence first; else as they were."""
    works = list(dict.fromkeys(work_key(case.record)._replace(rows=0) for case in cases))
    names = list(dict.fromkeys(case.name for case in cases))

    def rank(case: Case) -> tuple[int, int, int]:
        work = work_key(case.record)._replace(rows=0)
        return works.index(work), names.index(case.name), SOURCES.index(case.source)

    return tuple(sorted(cases, key=rank))


def _case_key(record: Record) -> object:
    """What two repetitions of one case have in common."""
    return record.name, record.source, record.cluster, plan_key(record.plan), work_key(record), record.epoch_samples


def plan_key(plan: Plan) -> object:
    """What a plan does, without the notes on why it was chosen."""
    return plan.stages, plan.num_microbatches, plan.route, plan.policy, plan.hold


class Work(NamedTuple):
    """What one step does; figures of different works do not compare."""

    model: str
    rows: int
    data: str
    precision: str


def work_key(record: Record) -> Work:
    """The work of a record's steps."""
    return Work(record.plan.model, record.step_samples, record.data, record.precision)


def strategy(plan: Plan) -> str:
    """The plan's type, in the words of the tables: `one device`, `data parallel`, `pipeline`, `ssp` …"""
    if len(plan.stages) == 1 and plan.is_synchronous:
        return "one device" if len(plan.devices) == 1 else "data parallel"
    if plan.is_synchronous:
        return "pipeline"
    for name in ("ssp", "2bw"):
        if plan.versions == parse_staleness(name, len(plan.stages)):
            return name
    return "stale " + ",".join(map(str, plan.versions))


def read_results(folder: Path, clusters: Sequence[Cluster] = ()) -> Results:
    """Every record, failure and cluster file under a folder."""
    if not folder.is_dir():
        raise FileError(
            f"{folder}: no such folder", "give the folder that `stagewright train` or `bench` wrote to with -o"
        )
    records = _read_records(folder)
    failures = tuple(map(Failure.load, sorted(folder.rglob(f"*{FAILURE_END}"), key=_natural)))
    if not records and not failures:
        raise UsageError(
            f"{folder} holds no {_RUN_RECORD}, no *{RECORD_END} and no *{FAILURE_END}",
            "run `stagewright train … -o DIR` or `stagewright bench SUITE -o DIR`",
        )
    found = [*folder.rglob("cluster.yaml"), *folder.rglob("*.cluster.yaml")]
    return Results(
        cases=in_order(make_cases(records.values(), records)),
        failures=(*failures, *(_nothing_done(record) for record in records.values() if not record.step_s)),
        clusters=(*clusters, *map(Cluster.load, sorted(found))),
    )


def _read_records(folder: Path) -> dict[Path, Record]:
    """The records under a folder, by file; one that a run left in its own folder is called by that folder.

    A record that was saved again under a name counts once: no two runs take the same time to the last digit.
    """
    found = {file: Record.load(file) for file in sorted(folder.rglob(f"*{RECORD_END}"), key=_natural)}
    seen = {_run_key(record) for record in found.values()}
    for file in sorted(folder.rglob(_RUN_RECORD), key=_natural):
        record, home = Record.load(file), file.parent
        if _run_key(record) not in seen:
            name = home.resolve().name if home == folder else home.relative_to(folder).as_posix()
            found[file] = replace(record, name=name)
            seen.add(_run_key(record))
    return found


def _nothing_done(record: Record) -> Failure:
    """The row of a resumed run that had no step left to do."""
    return Failure(
        name=record.name, reason="it was resumed after its last step: nothing was trained", model=record.plan.model,
        placement=record.plan.placement, source=record.source, command=record.command,
    )  # fmt: skip


def _run_key(record: Record) -> object:
    """What tells one run from another."""
    return record.source, plan_key(record.plan), record.step_s


def _natural(path: Path) -> list[tuple[int, str]]:
    """What files sort by, so that 8 comes before 16."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def remarks(record: Record) -> tuple[str, ...]:
    """The notes that must be read with a record's figures: all but those on where its time goes."""
    return tuple(note for note in record.notes if not note.startswith(WHERE_TIME_GOES))


def log_of(file: Path | None) -> Path | None:
    """The log or archive beside a record's file, or the record itself."""
    if file is None:
        return None
    stem = file.name.removesuffix(RECORD_END)
    names = ("events.jsonl",) if file.name == _RUN_RECORD else (stem + ".log", stem + ".zip")
    beside = (file.with_name(name) for name in names)
    return next((path for path in beside if path.is_file()), file)
