"""How long the planner takes: the processor's seconds for each case, beside the bar it must stay below.

python benchmarks/planner.py                       PipeDream's profiles × devices × rates, and 1,000 layers × 64 devices
python benchmarks/planner.py ../shared/profiles    the profiles lie there: pipedream/vgg16.txt and so on

Seconds are those of the processor, the best of several runs: others may use the machine too. The status is 1 where a
bar is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from stagewright.cluster import Device, make_cluster
from stagewright.planning import PlanOptions
from stagewright.planning.reasons import shape
from stagewright.planning.search import make_plan
from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.pipedream import import_pipedream

PROFILES = Path(__file__).resolve().parents[2] / "shared" / "profiles"
ROWS = {"vgg16": 128, "alexnet": 256, "gnmt": 128, "resnet50": 128}
RATES = (1e9, 3.125e9, 1e10)
BAR_S, DEEP_BAR_S = 1.0, 10.0
MIB, GIB = 1 << 20, 1 << 30


class Case(NamedTuple):
    """A profile on so many devices with one rate."""

    profile: Profile
    batch: int
    num_devices: int
    memory_bytes: int
    bytes_per_s: float | None
    staleness: str
    bar_s: float


def pipedream_cases(folder: Path) -> Iterator[Case]:
    """Each profile that PipeDream published, on 4, 8 and 16 devices at three rates."""
    for name, rows in ROWS.items():
        profile = import_pipedream(folder / "pipedream" / f"{name}.txt", batch=rows)
        for count, rate, staleness in product((4, 8, 16), RATES, ("0", "ssp")):
            yield Case(profile, rows, count, 16 * GIB, rate, staleness, BAR_S)


def deep_profile(num_layers: int) -> Profile:
    """Many layers of uneven cost."""
    draw = random.Random(1)
    layers = tuple(
        LayerProfile(
            name=f"l{number}",
            forward_s=(draw.uniform(0.0005, 0.002),),
            backward_s=(draw.uniform(0.001, 0.004),),
            output_bytes=draw.choice([1e5, 1e6]),
            saved_bytes=1e6,
            parameter_bytes=draw.choice([0, MIB, 8 * MIB]),
        )
        for number in range(num_layers)
    )
    return Profile(model="deep", device="cpu", source="analytic", batch_sizes=(64,), layers=layers)


def deep_case() -> Case:
    """A thousand layers on 64 devices."""
    return Case(deep_profile(1000), 512, 64, 80 * GIB, None, "0", DEEP_BAR_S)


def measure(case: Case, repeats: int) -> tuple[float, str]:
    """The processor's seconds of the fastest of several runs, and the shape that was found."""
    wires = {} if case.bytes_per_s is None else {"bytes_per_s": case.bytes_per_s}
    cluster = make_cluster(case.num_devices, device=Device(kind="cpu", memory_bytes=case.memory_bytes), **wires)
    options, seconds, found = PlanOptions(batch=case.batch, staleness=case.staleness), float("inf"), ""
    for _ in range(repeats):
        began = time.process_time()
        plan = make_plan(case.profile, cluster, options).best.plan
        seconds = min(seconds, time.process_time() - began)
        found = shape(plan).split(" cut at")[0]
    return seconds, found


def show(case: Case, repeats: int) -> bool:
    """Prints one line of the table; True where the bar is kept."""
    seconds, found = measure(case, repeats)
    rate = "" if case.bytes_per_s is None else f"{case.bytes_per_s / 1e9:.3f}"
    word = "" if seconds < case.bar_s else "  missed"
    print(
        f"{case.profile.model:<9} {len(case.profile.layers):>6,} {case.num_devices:>8} {rate:>7} {case.staleness:>10} "
        f"{seconds:>8.3f} {case.bar_s:>5.0f}  {found}{word}",
        flush=True,
    )
    return seconds < case.bar_s


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="?", default=PROFILES, help="the folder that holds pipedream/")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, of which the fastest counts")
    given = parser.parse_args()
    missing = [name for name in ROWS if not (given.profiles / "pipedream" / f"{name}.txt").is_file()]
    if missing:
        print(f"error: {given.profiles / 'pipedream'} has no {missing[0]}.txt", file=sys.stderr)
        print("       give the folder that holds PipeDream's profiles as pipedream/NAME.txt", file=sys.stderr)
        sys.exit(2)
    print("model     layers  devices    GB/s  staleness  seconds   bar  stages")
    kept = [show(case, given.repeats) for case in (*pipedream_cases(given.profiles), deep_case())]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
