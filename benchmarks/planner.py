"""How long the planner takes, and how far its plans are from the best of all: each beside the bar it must stay below.

python benchmarks/planner.py                       PipeDream's profiles × devices × rates, deep models, small clusters
python benchmarks/planner.py ../shared/profiles    the profiles lie there: pipedream/vgg16.txt and so on
python benchmarks/planner.py --clusters 0          without the small clusters, whose every plan takes some minutes

Seconds are those of the processor, the best of several runs: others may use the machine too. PipeDream's profiles and
1,000 layers on 64 devices are planned by the estimate alone, the others with the simulator as judge. The status is 1
where a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from stagewright.cluster import Device, make_cluster
from stagewright.errors import PlanError
from stagewright.planning import PlanOptions
from stagewright.planning.search import make_plan, shape
from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.pipedream import import_pipedream
from stagewright.simulation import simulator

PROFILES = Path(__file__).resolve().parents[2] / "shared" / "profiles"
ROWS = {"vgg16": 128, "alexnet": 256, "gnmt": 128, "resnet50": 128}
RATES = (1e9, 3.125e9, 1e10)
BAR_S, DEEP_BAR_S, JUDGED_BAR_S = 1.0, 10.0, 20.0
BEHIND_BAR = 0.02
"""How far behind the best of all plans the planner's may be."""
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
    is_judged: bool = False
    """Whether the simulator has the last word."""


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


def deep_cases() -> Iterator[Case]:
    """A thousand layers on 64 devices, and more of them on eight with stale weights allowed."""
    yield Case(deep_profile(1000), 512, 64, 80 * GIB, None, "0", DEEP_BAR_S)
    for staleness in ("ssp", "any"):
        yield Case(deep_profile(1250), 512, 8, 80 * GIB, None, staleness, JUDGED_BAR_S, is_judged=True)


def measure(case: Case, repeats: int) -> tuple[float, str]:
    """The processor's seconds of the fastest of several runs, and the shape that was found."""
    wires = {} if case.bytes_per_s is None else {"bytes_per_s": case.bytes_per_s}
    cluster = make_cluster(
        case.num_devices, device=Device(kind=case.profile.device, memory_bytes=case.memory_bytes), **wires
    )
    options, seconds, found = PlanOptions(batch=case.batch, staleness=case.staleness), float("inf"), ""
    for _ in range(repeats):
        began = time.process_time()
        score = simulator(case.profile, cluster) if case.is_judged else None
        plan = make_plan(case.profile, cluster, options, score).best.plan
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


def behind_the_best(seed: int, *, mixed: bool = False) -> tuple[float, float] | None:
    """By which share a plan takes longer than the best of all plans of a random case: judged, and by the estimate.

    None where no plan fits, and the planner says so too.
    """
    from benchmarks.oracle import best_of_all, random_case, random_mixed_case

    made = random_mixed_case if mixed else random_case
    case, (best_s, _) = made(seed), best_of_all(seed, made)
    if best_s == float("inf"):
        try:
            make_plan(case.profile, case.cluster, PlanOptions(batch=case.batch, staleness=case.staleness))
        except PlanError:
            return None
    options, score = PlanOptions(batch=case.batch, staleness=case.staleness), simulator(case.profile, case.cluster)
    judged = make_plan(case.profile, case.cluster, options, score).best.plan
    estimated = make_plan(case.profile, case.cluster, options).best.plan
    return tuple(score(plan).median_step_s / best_s - 1 for plan in (judged, estimated))  # type: ignore[return-value]


def show_clusters(count: int, *, mixed: bool = False) -> bool:
    """Prints how far plans are behind the best of all over so many small clusters; True where the bar is kept.

    Clusters on which nothing fits are passed over.
    """
    found = (behind_the_best(seed, mixed=mixed) for seed in itertools.count())
    every = list(itertools.islice((each for each in found if each is not None), count))
    what = "kinds with a profile each and little memory" if mixed else "speeds"
    print(f"\nbehind the best of all plans, {count} clusters of mixed {what}; the bar is {BEHIND_BAR:.0%} in each")
    for name, values in zip(("simulated", "estimate alone"), zip(*every)):
        ordered = sorted(values)
        at = {share: ordered[int(share * (count - 1))] for share in (0.5, 0.9, 0.99, 1.0)}
        over = sum(value > BEHIND_BAR for value in values)
        words = ", ".join(f"{share:.0%}: {value:+.2%}" for share, value in at.items())
        print(f"{name:<15} mean {sum(values) / count:+.2%}; {words}; {over} over the bar", flush=True)
    return max(judged for judged, _ in every) <= BEHIND_BAR


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="?", default=PROFILES, help="the folder that holds pipedream/")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, of which the fastest counts")
    parser.add_argument(
        "--clusters", type=int, default=200, help="small clusters to compare with the best of all plans"
    )
    parser.add_argument("--mixed", type=int, default=20, help="the same of mixed kinds with a profile each")
    parser.add_argument("--only-clusters", action="store_true", help="nothing but the small clusters")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script has its own folder there, not the one above
    if given.only_clusters:
        counts = ((given.clusters, False), (given.mixed, True))
        sys.exit(0 if all(show_clusters(many, mixed=mixed) for many, mixed in counts if many) else 1)
    missing = [name for name in ROWS if not (given.profiles / "pipedream" / f"{name}.txt").is_file()]
    if missing:
        print(f"error: {given.profiles / 'pipedream'} has no {missing[0]}.txt", file=sys.stderr)
        print("       give the folder that holds PipeDream's profiles as pipedream/NAME.txt", file=sys.stderr)
        sys.exit(2)
    print("model     layers  devices    GB/s  staleness  seconds   bar  stages")
    kept = [show(case, given.repeats) for case in (*pipedream_cases(given.profiles), *deep_cases())]
    kept += [show_clusters(given.clusters)] if given.clusters else []
    kept += [show_clusters(given.mixed, mixed=True)] if given.mixed else []
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
