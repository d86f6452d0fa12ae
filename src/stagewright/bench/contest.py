"""Contenders that take turns in the same workers: one worker of a contest.

    python -m stagewright.bench.contest FOLDER        under torchrun, one worker a host
    python -m stagewright.bench.contest FOLDER alone  the single process, which takes its turns outside of the hosts

FOLDER/contest.json says what to run; worker 0 leaves FOLDER/times.json with each contender's seconds a step, round by
round.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.bench.baselines import Rows, Step, data_parallel, make_optimizer, make_rows, pipelining, plain_loop
from stagewright.models import Layered, build_model
from stagewright.plan import Plan
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.flight import write_json
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule

ALONE = "single"
"""The contender that runs outside of the hosts."""
DRAIN = 3
"""Steps more of a run without a flush: those in which it fills and drains are left out."""
NAP_S = 0.002
PATIENCE_S = 600.0

Spec = Mapping[str, Any]


@dataclass
class Contest:
    """What a folder asks for."""

    folder: Path
    spec: Spec
    model: Layered = field(init=False)
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.model = build_model(self.spec["model"], **self.spec["options"])
        self.rows = make_rows(self.model, self.spec["batch"])


class Clocked:
    """A contender with the seconds of its last turn."""

    def __init__(self, step: Step) -> None:
        self.step, self.seconds = step, 0.0

    def turn(self, steps: int, world: World) -> float:
        """Seconds a step of a turn in which all workers take part."""
        wait(world)
        started = time.perf_counter()
        self.step(steps)
        wait(world)
        return (time.perf_counter() - started) / steps


class Ours(Clocked):
    """Our worker with a plan; without a flush, the time is that between updates of the steady batches."""

    def __init__(self, plan: Plan, contest: Contest, world: World) -> None:
        super().__init__(self.run)
        inputs, labels = contest.rows.inputs, contest.rows.labels
        feed = FunctionFeed(lambda _, a, b: (tuple(tensor[a:b] for tensor in inputs), (labels[a:b],)))
        schedule = make_schedule(plan)
        self.worker = Worker(schedule, contest.model, world, Settings(), make_optimizer=make_optimizer, feed=feed)
        self.worker.on_update = lambda batch: self.updated.append(time.perf_counter())
        self.updated: list[float] = []
        self.done, self.flushes = 0, plan.is_synchronous

    def run(self, number: int) -> None:
        """Runs a number of batches."""
        self.updated = []
        self.worker.run(number, self.done)
        self.done += number
        self.worker.figures.clear()

    def turn(self, steps: int, world: World) -> float:
        if self.flushes:
            return super().turn(steps, world)
        super().turn(steps + DRAIN, world)
        return (self.updated[-2] - self.updated[0]) / (len(self.updated) - 2)


class Outside:
    """The single process, seen from the workers: worker 0 asks it for a turn through files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def turn(self, steps: int, world: World) -> float:
        wait(world)
        seconds = 0.0
        if world.worker == 0:
            write_json(self.folder / f"asked-{self.number}.json", {"steps": steps})
            seconds = float(awaited(self.folder / f"answer-{self.number}.json")["seconds"])
        self.number += 1
        wait(world)
        return seconds


def awaited(path: Path) -> Any:
    """What a file says, once it is there."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear within {PATIENCE_S:g} s")
        time.sleep(NAP_S)
    return json.loads(path.read_text(encoding="utf-8"))


def wait(world: World) -> None:
    """Waits for all workers."""
    if world.control is not None:
        dist.barrier(group=world.control)


def make_contender(told: Spec, contest: Contest, world: World) -> Clocked | Outside:
    """The contender that an entry of the contest describes."""
    if told["kind"] == "plan":
        return Ours(Plan.from_dict(told["plan"]), contest, world)
    if told["kind"] == "ddp":
        # DDP listens to its parameters' gradients: nobody else may use them.
        return Clocked(data_parallel(copy.deepcopy(contest.model), contest.rows, world))
    if told["kind"] == "pipelining":
        model = copy.deepcopy(contest.model) if told["replicas"] > 1 else contest.model
        return Clocked(pipelining(model, contest.rows, world, told["cuts"], told["microbatches"]))
    return Outside(contest.folder)


def run_worker(contest: Contest) -> None:
    """Takes part in all rounds; worker 0 writes the times down after each."""
    spec = contest.spec
    with open_world(Settings(timeout_s=PATIENCE_S)) as world:
        contenders = {told["name"]: make_contender(told, contest, world) for told in spec["contenders"]}
        threads = {told["name"]: told["threads"] for told in spec["contenders"]}
        first = {name: turn(each, 1, threads[name], world) for name, each in contenders.items()}
        steps = {name: agreed_steps(seconds, spec["turn_s"], world) for name, seconds in first.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(spec["rounds"]):
            for name, each in contenders.items():
                times[name].append(turn(each, steps[name], threads[name], world))
            if world.worker == 0:
                write_json(contest.folder / "times.json", times)
        if world.worker == 0:
            write_json(contest.folder / "over.json", {})
        wait(world)


def turn(each: Clocked | Outside, steps: int, threads: int, world: World) -> float:
    """Seconds a step of one turn, with so many threads a worker."""
    torch.set_num_threads(threads)
    return each.turn(steps, world)


def agreed_steps(seconds: float, turn_s: float, world: World) -> int:
    """How many steps fill a turn: as worker 0 sees it."""
    number = torch.tensor([max(1, min(20, round(turn_s / max(seconds, 1e-6))))])
    if world.control is not None:
        dist.broadcast(number, 0, group=world.control)
    return int(number)


def run_alone(contest: Contest) -> None:
    """Takes the turns of the single process until the contest is over."""
    torch.set_num_threads(contest.spec["cores"])
    step, number = plain_loop(contest.model.model, contest.rows), 0
    while not (contest.folder / "over.json").exists():
        asked = contest.folder / f"asked-{number}.json"
        if not asked.exists():
            time.sleep(NAP_S)
            continue
        steps = int(json.loads(asked.read_text(encoding="utf-8"))["steps"])
        started = time.perf_counter()
        step(steps)
        write_json(contest.folder / f"answer-{number}.json", {"seconds": (time.perf_counter() - started) / steps})
        number += 1


def main(folder: str, role: str = "") -> None:
    """Runs as one of the workers, or as the single process."""
    where = Path(folder)
    contest = Contest(where, json.loads((where / "contest.json").read_text(encoding="utf-8")))
    if role == "alone":
        run_alone(contest)
    else:
        run_worker(contest)


if __name__ == "__main__":
    main(*sys.argv[1:])
