"""One worker on one card against the plain loop at its best: the same model, rows and optimizer, taking turns.

    python benchmarks/card.py                          every case
    python benchmarks/card.py resnet50-fp16-compile    one of them
    python benchmarks/card.py resnet50-fp16-compile --only replayed    against one loop

The plain loop runs with torch's default optimizer and with the fused one, which is ours, and where models are compiled
also with the options of inductor that ours sets. The fastest of them and ours then take long turns, and the ratio is
the median of that of each pair of turns. Letting cuDNN try its algorithms changed nothing for any of them.

fp16 begins with a loss scale that does not overflow: a fused SGD whose first step GradScaler skips goes on with a
momentum that nobody has set, and soon with nothing but NaN, on which a card is faster. So the losses stand beside the
times, and one that is not finite ends the benchmark.

A last turn has events on the card between forward, backward and update, and tells where the time goes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.baselines import mean_loss

from stagewright.cluster import DeviceId
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.profile import Precision
from stagewright.runtime.compiling import COMBINED, REPLAYED
from stagewright.runtime.precision import autocast
from stagewright.runtime.run_folder import RunFolder
from stagewright.runtime.safety.flight import Flight
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.schedule import Action, Kind
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.listener import Listener
from stagewright.training.loop import Run, feed_of, maker_of, synthetic_feed
from stagewright.training.metrics import METRICS, accuracy_sums
from stagewright.training.recipes import Recipe

ROUNDS = 3
TURN_S = 2.0
PAIRS = 9
PAIR_TURN_S = 5.0
"""So long that what a turn does once, until its first kernel runs and after its last, is not seen."""
LOSS_SCALE = 1024.0
LEARNING_RATE = 0.001
"""At ten times that AlexNet, thousands of steps over the same rows, ends in NaN after some eight hundred."""
LOG_EVERY = Job(steps=1).log_every
"""Turns end with a log line of ours, which is a part of what is timed."""

Step = Callable[[int], Tensor]
"""Runs so many steps; the last one's loss."""
Turns = dict[str, list[tuple[float, float]]]
"""By contender its seconds a step and its loss, turn by turn."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    batch: int
    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False

    def settings(self) -> Settings:
        """As a worker takes them."""
        return Settings(
            device="cuda", precision=self.precision, channels_last=self.channels_last, compile=self.compile,
            loss_scale=LOSS_SCALE,
        )  # fmt: skip


CASES = {
    "alexnet": Case("alexnet", 256),
    "resnet50": Case("resnet50", 128),
    "resnet50-fp16": Case("resnet50", 256, "fp16", channels_last=True),
    "resnet50-fp16-compile": Case("resnet50", 256, "fp16", channels_last=True, compile=True),
}


class Phases:
    """Moments on the card, by the name of what ends there; nothing is noted until it is asked for."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, torch.cuda.Event]] | None = None

    def mark(self, ended: str) -> None:
        """Notes that something ends here."""
        if self.moments is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.moments.append((ended, event))

    def of(self, step: Step, number: int) -> dict[str, float]:
        """Milliseconds a step of each phase of so many steps; the first one, before which nothing ran, is left out."""
        self.moments = []
        step(number + 1)
        torch.cuda.synchronize()
        found: dict[str, float] = {}
        later = self.moments[len(self.moments) // (number + 1) - 1 :]
        for (_, before), (name, after) in pairwise(later):
            found[name] = found.get(name, 0.0) + before.elapsed_time(after) / number
        self.moments = None
        return found


PHASES = Phases()
ENDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}


def plain(case: Case, *, fused: bool, options: dict[str, bool] | None = None) -> Step:
    """The ordinary loop, with autocast and GradScaler where the case is in fp16."""
    settings = case.settings()
    layered = build_model(case.model, seed=0)
    module = layered.model.cuda().train()
    if case.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs, labels = rows(case)
    run = torch.compile(module, options={**options} if options else None) if case.compile else module
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=settings.loss_scale, enabled=case.precision == "fp16")

    def step(number: int) -> Tensor:
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            with autocast(settings):
                loss = mean_loss(run(inputs), labels)
            PHASES.mark("forward")
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            PHASES.mark("backward")
            scaler.step(optimizer)
            scaler.update()
            PHASES.mark("update")
        return loss.detach().clone()  # a graph that is replayed writes there again

    return step


def rows(case: Case) -> tuple[Tensor, Tensor]:
    """The batch, on the card, as a loader makes it."""
    made = replace(case.settings(), precision="fp32")
    feed = synthetic_feed(build_model(case.model, seed=0), made, torch.device("cuda"))
    return feed.inputs(0, 0, case.batch)[0], feed.targets(0, 0, case.batch)[0]


def ours(case: Case, world: World, folder: Path) -> Step:
    """One worker that has the whole model as its one stage, with all that `stagewright train` puts around it."""
    settings, model = case.settings(), build_model(case.model, seed=0)
    stage = Stage(layers=model.names, devices=(DeviceId(0, 0),))
    schedule = make_schedule(Plan(model=case.model, stages=(stage,), batch=case.batch), agree=settings.agrees)
    recipe, job = Recipe(optimizer="sgd", learning_rate=LEARNING_RATE, momentum=0.9), Job(steps=10**9)
    run = Run(schedule, model, job, settings, recipe, None, None, "", "measured", RunFolder(folder, ""), world)
    worker = Worker(
        schedule, model, world, settings, make_optimizer=maker_of(run), feed=feed_of(run, None), metric=accuracy_sums,
        num_metrics=len(METRICS), flight=Flight(folder, 0),
    )  # fmt: skip
    warm_up(worker)
    worker.handlers |= {kind: marked(worker.handlers[kind], ended) for kind, ended in ENDS.items()}
    listener = Listener(run, worker, None, None)
    done = [0]

    def step(number: int) -> Tensor:
        worker.run(number, done[0])
        done[0] += number
        listener.scalars.drain()
        found = [point.value for point in listener.points if (point.name, point.step) == ("loss", done[0])]
        return torch.tensor(found[0] if found else math.nan)  # what is not finite is in no curve

    return step


def marked(handler: Callable[[Action], None], ended: str) -> Callable[[Action], None]:
    """The same, with a mark where it ends."""

    def handle(action: Action) -> None:
        handler(action)
        PHASES.mark(ended)

    return handle


def measure(step: Step, number: int) -> tuple[float, float]:
    """Seconds a step, and the loss."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    loss = step(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / number, float(loss)


def contend(name: str, case: Case, world: World, folder: Path, only: str) -> None:
    """All contenders of a case, then the best of them and ours."""
    loops: dict[str, Callable[[], Step]] = {
        "plain": partial(plain, case, fused=False), "plain, fused": partial(plain, case, fused=True),
    }  # fmt: skip
    if case.compile:
        loops["plain, combined"] = partial(plain, case, fused=True, options=COMBINED)
        loops["plain, replayed"] = partial(plain, case, fused=True, options=COMBINED | REPLAYED)
    contenders = {who: make() for who, make in loops.items() if only in who}
    contenders["ours"] = ours(case, world, folder)
    for step in contenders.values():
        step(LOG_EVERY)
    step_s = measure(next(iter(contenders.values())), LOG_EVERY)[0]
    times = take_turns(contenders, ROUNDS, steps_for(TURN_S, step_s))
    show(name, case, times)
    best = min(contenders.keys() - {"ours"}, key=lambda who: middle_s(times[who]))
    pair = {who: contenders[who] for who in (best, "ours")}
    turns = take_turns(pair, PAIRS, steps_for(PAIR_TURN_S, step_s))
    show(name, case, turns)
    ratios = sorted(plain_s / own_s for (plain_s, _), (own_s, _) in zip(turns[best], turns["ours"]))
    for who, step in contenders.items():
        phases = PHASES.of(step, steps_for(TURN_S, step_s))
        spent = ", ".join(f"{phase} {spent:.2f} ms" for phase, spent in phases.items())
        print(f"{name:22} {who:16} {spent}", flush=True)
    print(f"{name:22} ratio {statistics.median(ratios):.4f}, of pairs {ratios[0]:.4f} … {ratios[-1]:.4f}", flush=True)


def steps_for(seconds: float, step_s: float) -> int:
    """The steps of a turn that ends with a log line."""
    return LOG_EVERY * max(1, round(seconds / LOG_EVERY / step_s))


def take_turns(contenders: dict[str, Step], rounds: int, steps: int) -> Turns:
    """Seconds a step and the loss of each contender, round by round, each in the other order than the one before."""
    times: Turns = {name: [] for name in contenders}
    for number in range(rounds):
        for who, step in list(contenders.items())[:: 1 if number % 2 else -1]:
            times[who].append(measure(step, steps))
    return times


def middle_s(values: list[tuple[float, float]]) -> float:
    """The median of the seconds a step."""
    return statistics.median(seconds for seconds, _ in values)


def show(name: str, case: Case, turns: Turns) -> None:
    """All contenders of some turns; one that does not learn ends the benchmark."""
    middle = {who: middle_s(values) for who, values in turns.items()}
    for who, values in turns.items():
        seconds, losses = zip(*values)
        spread, rate = (max(seconds) - min(seconds)) / middle[who], case.batch / middle[who]
        print(
            f"{name:22} {who:16} {middle[who] * 1e3:8.2f} ms  {rate:9,.0f} images/s  spread {spread:5.1%}  "
            f"loss {losses[0]:.4f} … {losses[-1]:.4f}", flush=True,
        )  # fmt: skip
        if not all(map(math.isfinite, losses)):
            raise SystemExit(f"{name}: {who} does not learn, its loss is {losses[-1]}")


def main(arguments: list[str]) -> None:
    """The cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--only", default="", help="only the plain loops whose names have this in them")
    given = parser.parse_args(arguments)
    with open_world(Settings(device="cuda")) as world, TemporaryDirectory() as folder:
        for name in given.cases or list(CASES):
            contend(name, CASES[name], world, Path(folder), given.only)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
