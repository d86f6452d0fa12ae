"""Cases → tasks: how each case will run on this machine, as which command, and if not, why."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from stagewright.bench.machine import Here
from stagewright.bench.suite import RECORDS, Case, Mode, Suite
from stagewright.cluster import Cluster, count, find_cluster, parse_placement
from stagewright.errors import StagewrightError, UsageError
from stagewright.planning.options import PlanOptions
from stagewright.profiling.detect import join_hosts
from stagewright.record import Source
from stagewright.runtime.launch.environment import expand_hosts
from stagewright.training.sections import section_keys

_SOURCES: Mapping[Mode, Source] = {"train": "measured", "rehearse": "rehearsed", "simulate": "simulated"}
_CheckWords = Callable[[Sequence[str]], None]
"""Refuses words that the command would not understand."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the person who runs a suite says beyond the file."""

    simulate: bool = False
    """simulate every case"""
    cluster: str | None = None
    """hardware of simulations and rehearsals: a name or file"""
    only: tuple[str, ...] = ()
    """cases whose names match, such as 'vgg16-*'"""
    device: str | None = None
    """cpu or cuda, whatever the suite says"""
    share: int | None = None
    """workers that share one card"""
    data: str | None = None
    """the folder that `data: records` stands for"""
    steps: int | None = None
    """optimizer steps of a run"""
    warm_up: int | None = None
    """first steps that are not measured"""
    nodes: str | None = None
    """hosts to start over ssh, such as host1,host2, for cases that need several"""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those hosts."""
        return expand_hosts(self.nodes) if self.nodes else ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """A case and how it will run: the words of its command, or the reason why it cannot run here."""

    case: Case
    mode: Mode
    words: tuple[str, ...] = ()
    cluster: Cluster | None = None
    """The hardware of a simulation or a rehearsal."""
    notes: tuple[str, ...] = ()
    """What a reader of the row must know."""
    skipped: str = ""

    @property
    def source(self) -> Source:
        """What its record is, or was to be."""
        return _SOURCES[self.mode]

    @property
    def command(self) -> str:
        """The command as a person would type it."""
        return shlex.join(("stagewright", *self.words)) if self.words else ""

    @property
    def num_workers(self) -> int:
        """How many processes it takes; 1 where the command itself decides."""
        stages = parse_placement(self.case.placement) if self.case.placement else ()
        return max(1, len({id for stage in stages for id in stage}))


def make_tasks(suite: Suite, choices: Choices, here: Here, check: _CheckWords) -> tuple[Task, ...]:
    """A task for each case whose name matches one of the chosen patterns; raises for what no machine could run."""
    for pattern in choices.only:
        if not any(fnmatchcase(case.name, pattern) for case in suite.cases):
            raise UsageError(
                f"--only {pattern!r} matches no case of {suite.name}", f"see `stagewright bench {suite.name} --list`"
            )
    tasks = []
    for case in suite.cases:
        if any(fnmatchcase(case.name, pattern) for pattern in choices.only or ("*",)):
            tasks.append(_make_task(_with_choices(case, choices), suite, choices, here))
    for task in tasks:
        try:
            if task.words:
                check(task.words)
        except StagewrightError as fault:
            raise UsageError(f"case {task.case.name}: {fault.what}", fault.todo) from None
    return tuple(tasks)


def _with_choices(case: Case, choices: Choices) -> Case:
    given = {key: getattr(choices, key) for key in ("device", "share", "steps", "warm_up")}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if choices.steps is not None and choices.warm_up is None:
        changes["warm_up"] = min(case.warm_up, max(0, choices.steps) // 3)
    if case.data == RECORDS and choices.data is not None and case.run != "simulate" and not choices.simulate:
        changes["data"] = choices.data
    return replace(case, **changes)


def _make_task(case: Case, suite: Suite, choices: Choices, here: Here) -> Task:
    """The task of one case: as it says, or as a simulation where it or its hardware cannot be had."""
    if choices.simulate or case.run == "simulate":
        return _simulation(case, suite, choices, ())
    if case.run == "rehearse":
        return _rehearsal(case, suite, choices, here)
    lack = _missing_hardware(case, choices, here)
    if lack and (choices.cluster or suite.cluster):
        return _simulation(case, suite, choices, (f"simulated, since {lack}",))
    if lack:
        return Task(case=case, mode="train", skipped=f"{lack}, and no cluster is named to simulate it on (--cluster)")
    if case.data == RECORDS:
        return Task(case=case, mode="train", skipped="its records are not here: name their folder with --data FOLDER")
    task = Task(case=case, mode="train", words=_train_words("train", case, choices))
    workers, cards = task.num_workers, here.num_cards
    if case.device != "cuda" or workers <= cards:
        return task
    note = f"{workers} workers share {count(cards, 'card')}: speeds and memory are not those of {workers}"
    return replace(task, notes=(note,))


def _missing_hardware(case: Case, choices: Choices, here: Here) -> str:
    """Why a case cannot run for real; nothing where it can."""
    if case.num_hosts > max(1, len(choices.hosts)):
        return f"it needs {count(case.num_hosts, 'host')} and --nodes names {len(choices.hosts) or 'none'}"
    ids = [id for stage in parse_placement(case.placement) for id in stage] if case.placement else []
    needed = max((id.device for id in ids), default=0) + 1
    if case.device == "cuda" and needed > here.num_cards * case.share:
        return f"it needs {count(needed, 'card')} and {here.num_cards or 'none'} is here"
    return ""


def _rehearsal(case: Case, suite: Suite, choices: Choices, here: Here) -> Task:
    name = choices.cluster or suite.cluster
    if name is None:
        return Task(case=case, mode="rehearse", skipped="no cluster is named to rehearse on (--cluster)")
    if not here.is_root:
        return Task(case=case, mode="rehearse", skipped="emulated hosts need root: run the suite with sudo")
    words = _train_words("rehearse", case, choices, "--cluster", name)
    return _fitted(Task(case=case, mode="rehearse", words=words), find_cluster(name))


def _simulation(case: Case, suite: Suite, choices: Choices, notes: tuple[str, ...]) -> Task:
    """The task of a case as a simulation; more hosts than the cluster has are made of its first one."""
    name = choices.cluster or suite.cluster
    if name is None:
        return Task(case=case, mode="simulate", skipped="no cluster is named to simulate it on (--cluster)")
    cluster, hosts = find_cluster(name), case.num_hosts
    if hosts > len(cluster.hosts):
        note = (
            f"{cluster.name} has {count(len(cluster.hosts), 'host')}: its first one {hosts} times, on 10 Gb/s Ethernet"
        )
        joined = f"{cluster.name}-x{hosts}"
        cluster = join_hosts((cluster.hosts[0],) * hosts, joined, notes=(*cluster.notes, note))
        # It lies beside the results, where the command finds it again.
        name, notes = f"{joined}.cluster.yaml", (*notes, note)
    # A folder of images is at hand only where a case runs for real; the simulator knows how fast hosts decode.
    own = "synthetic" if case.data.startswith("python:") else RECORDS
    shown = case if case.data in ("synthetic", RECORDS) else replace(case, data=own)
    words = ["simulate", case.model, "--cluster", name, *_plan_words(case)]
    words += ["--precision", case.precision, "--data", shown.data]
    words += [] if case.epoch_images is None else ["--epoch-images", str(case.epoch_images)]
    return _fitted(Task(case=shown, mode="simulate", words=tuple(words), notes=notes), cluster)


def _fitted(task: Task, cluster: Cluster) -> Task:
    """The task on a cluster, if its plan fits there."""
    try:
        task.case.make_plan(cluster)
    except StagewrightError as fault:
        return replace(task, notes=(), skipped=f"it does not fit {cluster.name}: {fault.what}")
    return replace(task, cluster=cluster)


def _plan_words(case: Case) -> list[str]:
    made: list[str] = []
    for key in section_keys(PlanOptions):
        value = case.placement if key.name == "placement" else getattr(case.plan, key.name)
        if value not in (None, "", (), key.default):
            made += _option_words(key.option, ",".join(value) if key.is_many else value)
    return made


def _option_words(option: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, tuple | list):
        return [word for each in value for word in (option, str(each))]
    return [option, str(value)]


def _train_words(verb: str, case: Case, choices: Choices, *more: str) -> tuple[str, ...]:
    words = [verb, case.model, *_plan_words(case)]
    words += ["--precision", case.precision, "--data", case.data]
    words += ["--steps", str(case.steps), "--warm-up", str(case.warm_up)]
    words += [] if case.epoch_images is None else ["--epoch-images", str(case.epoch_images)]
    if verb == "train":
        words += ["--no-save-final"]
        words += [] if case.device is None else ["--device", case.device]
        words += ["--share", str(case.share)] if case.share > 1 else []
        words += ["--nodes", ",".join(choices.hosts[: case.num_hosts])] if case.num_hosts > 1 else []
    for key, value in case.options.items():
        words += _option_words("--" + key.replace("_", "-"), value)
    return (*words, *more)
