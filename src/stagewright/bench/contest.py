"""Contenders that take turns in the same workers: one worker of a contest.

    python -m stagewright.bench.contest FOLDER        under torchrun, one worker a host
    python -m stagewright.bench.contest FOLDER alone  the single process, which takes its turns outside of the hosts

Where contest.json names a pipe, the worker is one of a pipeline that others let go on and stop: see frozen.py.

FOLDER/contest.json says what to run; worker 0 leaves FOLDER/times.json with each contender's seconds a step, round by
round, and from when to when these were.

Few rounds tell plans apart that are far from each other. Exact ones that stay close to the planner's choice go on.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stagewright.bench.agreeing import agreed, agreed_turn, told_by_all, told_by_first, wait
from stagewright.bench.baselines import (
    Rows,
    Step,
    data_parallel,
    deepspeed_pipeline,
    each_alone,
    make_optimizer,
    make_rows,
    pipelining,
    plain_loop,
)
from stagewright.bench.frozen import Frozen, tell
from stagewright.bench.rounds import batches_for, close_ones, family_of, fastest, stale_steps, steady, steps_for
from stagewright.models import Layered, build_model
from stagewright.plan import Plan
from stagewright.profile import Kernels
from stagewright.profiling.heap import give_back_freed_memory
from stagewright.profiling.kernels import computing_with
from stagewright.profiling.measured import time_model
from stagewright.profiling.pulse import Timed
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.flight import write_json
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from stagewright.training.loop import run_stretch

ALONE = "single"
"""The contender that runs outside of the hosts."""
PASSES = "passes"
"""The contender that tells how fast the machine is, against the profile."""
LONG_STEP_S = 2.0
"""A step that takes longer is not spoilt by what its first run does once: it is in the first round already."""
HOPELESS_S = 5.0
"""A peer whose step takes longer waits for wires, and so it does with another number of microbatches: none is tried."""
RUN_ON_S = 12.0
"""How long exact plans go on that the rounds could not tell from the planner's choice."""
NAP_S = 0.002
PATIENCE_S = 600.0
LASTS_S = 3600.0
"""How long a worker may wait that is stopped now and then."""
ENDLESS = 1_000_000
CARD_PATIENCE_S = 60.0
"""How long one contender on a card may take: NCCL between workers that share one can hang, and the rest shall count."""

WEIGHTS = "weights.pt"
"""The file with the weights that everyone begins with, where whoever asks for a contest has made one."""

Spec = Mapping[str, Any]


@dataclass
class Contest:
    """What a folder asks for."""

    folder: Path
    spec: Spec
    kept: Layered = field(init=False)
    """The model that others are copies of."""
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        weights = Path(self.spec.get("weights", self.folder / WEIGHTS))
        with Unfilled() if weights.exists() else nullcontext():
            self.kept = build_model(self.spec["model"], **self.spec["options"])
        if weights.exists():
            # One copy among all workers: eight of their own are more than memory has.
            common = torch.load(weights, mmap=True)
            for name, tensor in self.kept.model.state_dict(keep_vars=True).items():
                tensor.data = common[name]
            give_back_freed_memory()
        self.rows = make_rows(self.kept, self.spec["batch"]).to(torch.device(self.device))

    def new_model(self, own: Collection[str] | None = None) -> Layered:
        """The model, each time anew: contenders put hooks on its layers, and where others' are they can not fold.

        Of some parameters alone there are new ones where a worker hosts no others.
        """
        return self.kept.copy(own)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What all contenders compute on."""
        return "cuda" if self.spec.get("device") == "cuda" else "cpu"

    @property
    def kernels(self) -> Kernels:
        """What all of them compute with on CPUs."""
        kernels: Kernels = self.spec.get("kernels", "onednn")
        return kernels


class Unfilled(TorchFunctionMode):
    """Inside, new weights stay as memory has them: others come in their place, and to draw them takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        fills = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init"
        return (args[0] if args else given["tensor"]) if fills else func(*args, **given)


class Clocked:
    """A contender whose steps run in the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def turn(self, steps: int, world: World) -> Timed:
        """Seconds a step of a turn in which all workers take part."""
        wait(world)
        started = time.perf_counter()
        self.step(steps)
        wait(world)
        stopped = time.perf_counter()
        return Timed((stopped - started) / steps, started, stopped)

    def close(self) -> None:
        """Ends what runs in the background."""


class Passes(Clocked):
    """Passes over the whole model in the hosts that the profile was taken in, as they were timed for it."""

    def __init__(self, told: Spec, contest: Contest, world: World) -> None:
        super().__init__(self.run)
        self.model, self.rows = contest.kept, told["rows"]
        self.takes_part, self.counted = world.worker in told["busy"], told["counted"]
        self.pass_s: list[float] = []

    def run(self, number: int) -> None:
        """Times a number of passes, where this host takes part."""
        # Gradients stay: what is given back must be faulted in again, which a profile's passes need not.
        self.pass_s = [time_model(self.model, self.rows) for _ in range(number if self.takes_part else 0)]

    def turn(self, steps: int, world: World) -> Timed:
        whole = super().turn(steps, world)
        seconds = told_by_all(mean(self.pass_s or [0.0]), world)
        return whole._replace(seconds=median(seconds[number] for number in self.counted))


class Ours(Clocked):
    """Our worker with a plan; without a flush, the time is that between updates of the steady batches."""

    def __init__(self, plan: Plan, contest: Contest, world: World) -> None:
        super().__init__(self.run)
        inputs, labels = contest.rows.inputs, contest.rows.labels
        feed = FunctionFeed(lambda _, a, b: (tuple(tensor[a:b] for tensor in inputs), (labels[a:b],)))
        schedule = make_schedule(plan)
        # A plan may leave hosts idle: their workers make the groups, and wait.
        used = replace(world, size=len(plan.devices))
        self.takes_part = world.worker < used.size
        settings = Settings(device=contest.device)
        model = contest.new_model(hosted_parameters(plan, contest.kept, world.worker))
        self.worker = Worker(schedule, model, used, settings, make_optimizer=make_optimizer, feed=feed)
        self.worker.on_update = lambda batch: self.worker.clock.mark()
        self.done, self.flushes, self.versions = 0, plan.is_synchronous, max(plan.versions)

    def run(self, number: int) -> None:
        """Runs a number of batches."""
        if self.takes_part:
            run_stretch(self.worker, self.done, self.done + number)
        for batch in range(self.done, self.done + number):
            self.worker.figures(batch)
        self.done += number

    def turn(self, steps: int, world: World) -> Timed:
        if self.flushes:
            return super().turn(steps, world)
        wanted = stale_steps(steps)
        whole = super().turn(batches_for(wanted, self.versions), world)
        if not self.takes_part:
            return whole
        gaps = self.worker.clock.step_s()
        counted = steady(gaps, wanted, self.versions)
        stopped = whole.stop_s - sum(gaps[len(gaps) - self.versions + 1 :])  # then it drained
        return Timed(mean(counted), stopped - sum(counted), stopped)

    def close(self) -> None:
        if self.takes_part:
            self.worker.close()


def hosted_parameters(plan: Plan, model: Layered, worker: int) -> set[str]:
    """The names of the parameters that a worker of a plan hosts."""
    found: set[str] = set()
    for stage in plan.stages:
        if worker in (plan.devices.index(id) for id in stage.devices):
            first = model.names.index(stage.layers[0])
            found |= set(model.parameter_names(first, first + len(stage.layers)))
    return found


class Outside:
    """The single process, seen from the workers: worker 0 asks it for a turn through files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def turn(self, steps: int, world: World) -> Timed:
        wait(world)
        seconds, started = 0.0, time.perf_counter()
        if world.worker == 0:
            write_json(self.folder / f"asked-{self.number}.json", {"steps": steps})
            seconds = float(awaited(self.folder / f"answer-{self.number}.json")["seconds"])
        self.number += 1
        wait(world)
        return Timed(seconds, started, time.perf_counter())


Contender = Clocked | Outside | Frozen


def awaited(path: Path) -> Any:
    """What a file says, once it is there."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear within {PATIENCE_S:g} s")
        time.sleep(NAP_S)
    return json.loads(path.read_text(encoding="utf-8"))


def make_contender(told: Spec, contest: Contest, world: World) -> Contender:
    """The contender that an entry of the contest describes."""
    if told["kind"] == "plan":
        return Ours(Plan.from_dict(told["plan"]), contest, world)
    if told["kind"] == "frozen":
        return Frozen(told, world)
    if told["kind"] == "passes":
        return Passes(told, contest, world)
    if told["kind"] == "each alone":
        return Clocked(each_alone(contest.new_model(), contest.rows, world))
    if told["kind"] == "ddp":
        return Clocked(data_parallel(contest.new_model(), contest.rows, world))
    if told["kind"] == "pipelining":
        return Clocked(pipelining(contest.new_model(), contest.rows, world, told["cuts"], told["microbatches"]))
    if told["kind"] == "deepspeed":
        return Clocked(deepspeed_pipeline(contest.new_model(), contest.rows, world, told["cuts"], told["microbatches"]))
    return Outside(contest.folder)


@dataclass
class Times:
    """What worker 0 saw: by contender its turns."""

    turns: dict[str, list[Timed]] = field(default_factory=dict)

    @property
    def step_s(self) -> dict[str, list[float]]:
        """By contender its seconds a step."""
        return {name: [each.seconds for each in turns] for name, turns in self.turns.items()}

    def save(self, path: Path) -> None:
        """Writes them down."""
        when = {name: [(each.start_s, each.stop_s) for each in turns] for name, turns in self.turns.items()}
        write_json(path, {"step_s": self.step_s, "when": when})


def run_worker(contest: Contest) -> None:
    """Takes part in all rounds; worker 0 writes the times down after each."""
    settings = Settings(device=contest.device, timeout_s=PATIENCE_S, kernels=contest.kernels)
    with open_world(settings) as world:
        times = Times()
        for group in contest.spec["groups"]:
            if contest.device == "cuda":
                faulthandler.dump_traceback_later(CARD_PATIENCE_S, exit=True)
            take_turns(group, contest, world, times)
            faulthandler.cancel_dump_traceback_later()
            if world.worker == 0 and any(told["kind"] == "alone" for told in group):
                write_json(contest.folder / "over.json", {})  # the single process ends, and others have its memory
            gc.collect()
            give_back_freed_memory()
            torch.cuda.empty_cache()
        wait(world)


def take_turns(told: Sequence[Spec], contest: Contest, world: World, times: Times) -> None:
    """Adds the seconds a step of some contenders, round by round."""
    contenders, first = warmed_up_ones(told, contest, world)
    turn_s = contest.spec["turn_s"]
    steps = {name: steps_for(turn.seconds, turn_s) for name, turn in first.items()}
    was_timed = {one["name"] for one in told if one.get("expected_s") is None}
    for name in contenders:
        times.turns[name] = [first[name]] if name in was_timed and first[name].seconds > LONG_STEP_S else []
    rounds = contest.spec["rounds"]
    for number in range(rounds):
        one_round(number, contenders, steps, world, times)
        if world.worker == 0:
            times.save(contest.folder / "times.json")
    names = told_by_first([] if world.worker else close_ones(told, times.step_s), world)
    close, started = {name: contenders[name] for name in names}, time.perf_counter()
    while close and agreed(time.perf_counter() - started, world) < RUN_ON_S:
        one_round(rounds, close, steps, world, times)
        rounds += 1
    if world.worker == 0:
        times.save(contest.folder / "times.json")
    for each in contenders.values():
        if isinstance(each, Clocked):
            each.close()


def one_round(
    number: int,
    contenders: Mapping[str, Contender],
    steps: Mapping[str, int],
    world: World,
    times: Times,
) -> None:
    """A turn of everyone who has none of this round yet."""
    # Who comes after whom matters: so they change places.
    for name in list(contenders)[:: -1 if number % 2 else 1]:
        if len(times.turns[name]) <= number:
            times.turns[name].append(contenders[name].turn(steps[name], world))


def warmed_up_ones(
    told: Sequence[Spec], contest: Contest, world: World
) -> tuple[dict[str, Contender], dict[str, Timed]]:
    """The contenders that stay, and what their first steps took.

    Whoever is out goes at once: eight workers with all of them need more memory than most machines have.
    """
    contenders: dict[str, Contender] = {}
    first: dict[str, Timed] = {}
    seconds: dict[str, float] = {}
    for one in told:
        if any(seconds.get(other["name"], 0.0) > HOPELESS_S for other in told if family_of(other) == family_of(one)):
            continue
        made = contenders[one["name"]] = make_contender(one, contest, world)
        gc.collect()  # of its model a worker needs its own layers alone
        give_back_freed_memory()
        torch.set_num_threads(contest.spec.get("threads", 1))
        first[one["name"]] = warmed_up(made, world, one.get("expected_s"))
        seconds = {name: turn.seconds for name, turn in first.items()}
        for lost in first.keys() - fastest([known for known in told if known["name"] in first], seconds):
            del contenders[lost], first[lost]
    return contenders, first


def warmed_up(each: Contender, world: World, expected_s: float | None = None) -> Timed:
    """A contender's second step, as worker 0 sees it: the first one opens connections and takes memory.

    Where a step is long, that does not matter, and the first is enough. What is expected of a plan tells well enough
    how many steps fill a turn: only the first is run, and none where it is long.
    """
    if expected_s is not None:
        if isinstance(each, Clocked) and expected_s <= LONG_STEP_S:
            each.step(1)
            wait(world)
        return Timed(expected_s, 0.0, 0.0)
    first = agreed_turn(each.turn(1, world), world)
    return first if first.seconds > LONG_STEP_S else agreed_turn(each.turn(1, world), world)


def run_frozen(contest: Contest) -> None:
    """Runs a pipeline that is stopped between its turns, until it is ended; it tells of updates."""
    settings = Settings(device=contest.device, timeout_s=LASTS_S, kernels=contest.kernels)
    with open_world(settings) as world:
        ours = Ours(Plan.from_dict(contest.spec["plan"]), contest, world)
        pipe = os.open(contest.spec["pipe"], os.O_RDWR)
        if world.worker == 0:
            ours.worker.on_update = lambda batch: tell(pipe)
        wait(world)
        if world.worker == 0:
            tell(pipe)
        ours.run(ENDLESS)
        signal.pause()  # no part of the plan: waits with the others


def run_alone(contest: Contest) -> None:
    """Takes the turns of the single process until they are over."""
    torch.set_num_threads(contest.spec["cores"])
    step, number = plain_loop(contest.kept.model, contest.rows), 0
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
    if "pipe" in contest.spec:
        run_frozen(contest)
    elif role == "alone":
        with computing_with(contest.kernels):
            run_alone(contest)
    else:
        run_worker(contest)


if __name__ == "__main__":
    main(*sys.argv[1:])
