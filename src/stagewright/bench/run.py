"""One repetition of one case: a process with its own log, or a simulation; either way a record or a failure."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from stagewright.bench.shelf import Place
from stagewright.bench.task import Task
from stagewright.bench.watch import Look, Seen, Watch, look_at_cards, look_at_workers
from stagewright.cluster import Cluster, DeviceId
from stagewright.errors import StagewrightError
from stagewright.record import DeviceUse, Record
from stagewright.report.cases import Failure
from stagewright.report.figures import size
from stagewright.runtime.launch.process import check_server, start_process
from stagewright.schema import dump_json
from stagewright.simulation.run import IMAGENET_IMAGES
from stagewright.simulation.setting import Scenario

_PATIENCE_S = 10.0
"""How long a run that is told to end may take to do so."""
_LONGEST_REASON = 600
DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all runs of one `stagewright bench` share."""

    facts: Mapping[str, str]
    num_cards: int = 0
    program: tuple[str, ...] = (sys.executable, "-m", "stagewright")


def run_once(task: Task, place: Place, session: Session) -> Record | Failure:
    """Runs a repetition and counts it; the result."""
    run = place.clear()
    facts = {**session.facts, "command": task.command}
    place.path(".environment.json").write_text(dump_json(facts), encoding="utf-8")
    try:
        if task.skipped:
            result: Record | Failure = _failure(task, task.skipped)
        elif task.mode == "simulate":
            result = _simulate(task, place, session)
        else:
            result = _run_process(task, place, run, session)
    except StagewrightError as fault:
        result = _failure(task, f"{fault.what}: {fault.todo}" if fault.todo else fault.what)
    place.keep(result)
    return result


def _failure(task: Task, reason: str) -> Failure:
    """The row of a case that gave no record."""
    case = task.case
    return Failure(
        name=case.name, reason=reason[:_LONGEST_REASON], model=case.model, placement=case.placement, source=task.source,
        command=task.command,
    )  # fmt: skip


def _simulate(task: Task, place: Place, session: Session) -> Record | Failure:
    """The simulation of a case, here and now: it has no start-up to share with others."""
    assert task.cluster is not None
    case, log = task.case, place.path(".log")
    setting = Scenario(
        model=case.model, precision=case.precision, data=case.data, epoch_images=case.epoch_images or IMAGENET_IMAGES
    )
    options = replace(case.plan, placement=case.placement)
    try:
        record = setting.record(task.cluster, options, name=case.name)
    except Exception as fault:
        log.write_text(f"$ {task.command}\n{traceback.format_exc()}", encoding="utf-8")
        if isinstance(fault, StagewrightError):
            raise
        return _failure(task, f"{type(fault).__name__}: {fault}")
    figures = f"step {record.median_step_s:.6f} s, {record.samples_per_s:.1f} images/s, limited by {record.limit}"
    log.write_text("\n".join((f"$ {task.command}", figures, *task.notes, *record.notes, "")), encoding="utf-8")
    # A simulation says nothing of the machine it was worked out on.
    facts = {key: session.facts[key] for key in ("stagewright", "commit") if key in session.facts}
    notes = (*task.notes, *_overflows(record, task.cluster), *record.notes)
    return replace(record, command=task.command, environment=facts, notes=notes)


def _overflows(record: Record, cluster: Cluster) -> tuple[str, ...]:
    """What must be said of a simulation that no device could hold."""
    fullest = max(record.devices, key=lambda use: use.peak_bytes, default=None)
    room = 0 if fullest is None else cluster.device(DeviceId.parse(fullest.device)).memory_bytes
    if fullest is None or fullest.peak_bytes <= room:
        return ()
    return (f"{DOES_NOT_FIT}: {size(fullest.peak_bytes)} on {fullest.device}, which has {size(room)}",)


def _run_process(task: Task, place: Place, run: Path, session: Session) -> Record | Failure:
    """The case as a process of its own, watched from outside while it runs; none outlives who started it."""
    words, log = [*session.program, *task.words, "-o", str(run), "--json"], place.path(".log")
    log.write_text(f"$ {task.command}\n", encoding="utf-8")
    process = start_process("run", words, os.environ, log)
    with Watch(_look_of(task, process.pid or 0, session)) as watch:
        status = _ended(process, task.case.limit_s)
    check_server([process])
    place.path(".samples.csv").write_text(watch.table(), encoding="utf-8")
    saved = run / "record.json"
    if status == 0 and saved.exists():
        return _finish(Record.load(saved), task, session, watch.seen())
    said = log.read_text(encoding="utf-8", errors="replace")
    return _failure(task, _reason_of(status, task.case.limit_s, said.partition("\n")[2], run))


def _look_of(task: Task, process: int, session: Session) -> Look:
    """Cards where the case uses them, else its worker processes."""
    uses_cards = session.num_cards > 0 and task.case.device != "cpu" and task.mode == "train"
    return look_at_cards() if uses_cards else look_at_workers(process, alone=task.num_workers == 1)


def _ended(process: BaseProcess, limit_s: float) -> int | None:
    """The exit status; None for a run that was ended because it took too long."""
    status = None
    try:
        process.join(limit_s)
        status = process.exitcode
    finally:
        for end in (process.terminate, process.kill):
            if process.exitcode is None:
                end()
                process.join(_PATIENCE_S)
    return status


def _reason_of(status: int | None, limit_s: float, said: str, run: Path) -> str:
    """Why a run gave no record, in its own words where it has any."""
    if status is None:
        return f"it did not end within {limit_s:g} s (limit_s)"
    if status == 0:
        return "it ended well but left no record.json: with --nodes its folder must be one that all hosts share"
    words = _own_words(said, run)
    ended = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
    return words if words and status > 0 else f"{ended}{f': {words}' if words else ''}"


def _own_words(said: str, run: Path) -> str:
    """The last `error: …` of a log with the lines that belong to it, or its last line."""
    lines = said.rstrip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return lines[-1].strip() if lines else ""
    block = [lines[starts[-1]].removeprefix("error: ")]
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith("       "):
            break
        block.append(line.strip())
    # Where its files lay while it ran says nothing to who reads the row.
    return "; ".join(line for line in block if str(run) not in line)


def _finish(record: Record, task: Task, session: Session, seen: Mapping[int, Seen]) -> Record:
    """The record under the case's name, with what was seen from outside and where it ran."""
    cards = session.num_cards if task.case.device != "cpu" else 0
    devices = tuple(_with_seen(use, seen.get(_card_of(number, cards))) for number, use in enumerate(record.devices))
    shared = f"{record.cluster}, {task.num_workers} workers on {cards}" if task.notes and cards else record.cluster
    facts = {**record.environment, **{key: value for key, value in session.facts.items() if key != "host"}}
    return replace(
        record, name=task.case.name, source=task.source, cluster=shared, command=task.command, environment=facts,
        devices=devices, notes=(*task.notes, *record.notes),
    )  # fmt: skip


def _card_of(worker: int, num_cards: int) -> int:
    """The card that a worker of one host uses, as the driver numbers them; without cards, the worker itself."""
    if not num_cards:
        return worker
    visible: Sequence[str] = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = worker % num_cards
    return int(visible[own]) if own < len(visible) and visible[own].isdecimal() else own


def _with_seen(use: DeviceUse, seen: Seen | None) -> DeviceUse:
    """What a device did, with what was seen of it from outside."""
    if seen is None:
        return use
    return replace(use, driver_bytes=max(seen.peak_bytes, use.driver_bytes or 0), driver_share=seen.busy_share)
