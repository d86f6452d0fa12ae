"""Workers that are slower than was predicted are named, with computing or sending as the reason.

worker 1   before step 100: the seconds of a few steps, those it computed, those it sent to each host ──▶ store
worker 0   before step 200: looks at what all left the time before, beside what the plan says
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stagewright.plan import Plan
from stagewright.runtime.safety.links import sending_s
from stagewright.runtime.timing import Stopwatch
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import Words
from stagewright.schedule import Action, Kind

_BOUND = 1.5
"""How many times as long as predicted is slow."""
_STEPS = 4
"""How many steps are looked at each time."""


class PaceCheck:
    """One worker's part of the comparison with the plan's prediction."""

    def __init__(self, worker: Worker, words: Words, every: int, tell: Callable[[str, str], object]) -> None:
        self._plan, self._world, self._words, self._tell = worker.plan, worker.world, words, tell
        self._every, self._steps = every, min(_STEPS, every - 1)
        self._watch = Stopwatch(self._world.worker, self._world.device)
        self._began, self._sent = 0.0, dict[str, float]()
        self._told: set[str] = set()
        for here in worker.replicas.values():
            here.runner.timed = partial(self._watch.span, Action(Kind.FORWARD, here.stage, 0))

    def after_update(self, batch: int) -> None:
        """Begins to look a few steps before it is due; leaves what was seen, and compares what was left before."""
        step = batch + 1
        if (step + self._steps) % self._every == 0:
            self._watch.start()
            self._began, self._sent = time.perf_counter(), sending_s(self._world.places, self._world.worker)
        elif step % self._every == 0 and self._watch.on:
            self._compare(step - self._every)
            self._leave(step)

    def close(self, step: int) -> None:
        """Compares what was left last."""
        self._compare(step // self._every * self._every)

    def _leave(self, step: int) -> None:
        passed_s, compute_s = time.perf_counter() - self._began, self._watch.stop()
        sent = sending_s(self._world.places, self._world.worker)
        own = {
            "step": step, "step_s": passed_s / self._steps, "compute_s": compute_s / self._steps,
            "send_s": {host: (now - self._sent.get(host, 0.0)) / self._steps for host, now in sent.items()},
        }  # fmt: skip
        self._words.put(f"pace/{self._world.worker}/{step // self._every % 2}", json.dumps(own))  # one may be ahead

    def _compare(self, step: int) -> None:
        """Names those that were slow, each once; worker 0 does it for all."""
        if self._world.worker or step <= 0:
            return
        left = [self._words.get(f"pace/{worker}/{step // self._every % 2}") for worker in range(self._world.size)]
        seen = {worker: json.loads(text) for worker, text in enumerate(left) if text is not None}
        for text in _slow_workers(self._plan, {who: own for who, own in seen.items() if own["step"] == step}):
            if (what := text.partition(":")[0]) not in self._told:
                self._told.add(what)
                self._tell("slow", f"{text}, at step {step}")


def _slow_workers(plan: Plan, seen: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is said of workers that are slow, by what each has seen: that it computes too long, or else sends too long.

    How long sending takes is told only where steps take too long as well: what is hidden harms nobody.
    """
    computing, sending = list[str](), list[str]()
    for worker, own in seen.items():
        stages = plan.stages_of[worker]
        who = f"worker {worker} (stage {', '.join(map(str, stages))}, device {plan.devices[worker]})"
        told = _if_slow(own["compute_s"], plan.predicted_compute_s, stages)
        computing += [f"{who} is slow at computing: {told}"] if told else []
        for host, host_s in own["send_s"].items() if own["step_s"] > _BOUND * (plan.predicted_step_s or 0.0) else ():
            told = _if_slow(host_s, plan.predicted_send_s, stages)
            # What is confirmed late is on its way for longer than it is sent: that is not why a long step is long.
            sending += [f"{who} is slow at sending to {host}: {told}"] if told and host_s > own["step_s"] / 4 else []
    if len(computing) == len(plan.devices) > 1:
        return [f"all workers are slow at computing, or {plan.predicted_on} is faster: {computing[0]}"]
    return computing or sending


def _if_slow(seen_s: float, predicted_s: Sequence[float], stages: Sequence[int]) -> str:
    """Both in words, where the one is much longer than the other."""
    wanted_s = sum(predicted_s[stage] for stage in stages)
    return f"{seen_s * 1e3:.3g} ms a step, predicted {wanted_s * 1e3:.3g}" if seen_s > _BOUND * wanted_s else ""
