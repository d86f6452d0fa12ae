"""How long schedules take to make and to check: the processor's seconds, beside the bar that both must stay below.

python benchmarks/schedules.py    64 workers, 512 microbatches, stages of several widths

The best of several runs counts: others may use the machine too. The status is 1 where the bar is missed.
"""

from __future__ import annotations

import sys
import time
from itertools import product

from stagewright.plan import Plan, Route
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.drawing import sketch_plan

NUM_MICROBATCHES = 512
CASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("8 × 8", (8,) * 8),
    ("63-1", (63, 1)),
    ("64 × 1", (1,) * 64),
    ("31-33", (31, 33)),
)
ROUTES: tuple[Route, ...] = ("split", "rotate")
BAR_S = 5.0
REPEATS = 2


def measure(plan: Plan) -> tuple[float, float]:
    """Seconds to make the plan's schedule, and to check it."""
    start = time.process_time()
    schedule = make_schedule(plan)
    made = time.process_time()
    check_schedule(schedule)
    return made - start, time.process_time() - made


def show(name: str, replicas: tuple[int, ...], route: Route) -> bool:
    """Prints one line of the table; True where the bar is kept."""
    plan = sketch_plan(replicas, num_microbatches=NUM_MICROBATCHES, batch=64 * NUM_MICROBATCHES, route=route)
    made, checked = min((measure(plan) for _ in range(REPEATS)), key=sum)
    word = "" if made + checked < BAR_S else "  missed"
    print(f"{name:<9} {route:<7} {made:>6.2f} {checked:>8.2f} {made + checked:>6.2f} {BAR_S:>5.0f}{word}", flush=True)
    return made + checked < BAR_S


def main() -> None:
    """Prints the table."""
    print("replicas  route    made  checked    sum   bar")
    kept = [show(name, replicas, route) for (name, replicas), route in product(CASES, ROUTES)]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
