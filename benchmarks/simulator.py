"""How fast the simulator is: actions a second on one core, and the memory that the largest case takes.

python benchmarks/simulator.py            a table of all cases, the largest with 1,024 devices
python benchmarks/simulator.py --quick    the small ones only

Events only: the engine alone. Simulate: the whole call, with memory over time and spans, which are made when they are
read; without detail, and with all spans read. Seconds are those of the processor, the best of many runs: others may use
the machine too.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.plan import Plan, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from stagewright.simulation.engine import Engine
from stagewright.simulation.program import make_program
from stagewright.simulation.run import no_collection


class Case(NamedTuple):
    """Replicas of each stage, microbatches, batches."""

    name: str
    replicas: tuple[int, ...]
    num_microbatches: int
    num_batches: int
    versions: tuple[int, ...] | None = None


CASES = (
    Case("7-1", (7, 1), 14, 20),
    Case("7-1 ssp", (7, 1), 14, 20, (2, 1)),
    Case("32 (data parallel)", (32,), 1, 20),
    Case("8 × 1", (1,) * 8, 512, 4),
    Case("8 × 8", (8,) * 8, 64, 2),
    Case("16 × 64", (64,) * 16, 64, 1),
)
DEVICES_A_HOST = 8
PATIENCE_S = 20.0
"""How long a case is run over and over. A machine may be twice as slow from one second to the next; the best counts."""


def make_hosts(num_devices: int) -> Cluster:
    """Hosts of eight devices behind one network card each."""
    links = [Link(ends=(str(n), "switch"), kind="PIX", bytes_per_s=12e9, latency_s=1e-6) for n in range(DEVICES_A_HOST)]
    links.append(Link(ends=("switch", "nic"), kind="PHB", bytes_per_s=12e9, latency_s=1e-6))
    host = Host(devices=(Device(kind="cpu", memory_bytes=1 << 40),) * DEVICES_A_HOST, links=tuple(links))
    count = -(-num_devices // DEVICES_A_HOST)
    wide = (Link(ends=(f"{n}:nic", "net"), kind="NET", bytes_per_s=12e9, latency_s=2e-6) for n in range(count))
    return Cluster(name="many", hosts=(host,) * count, links=tuple(wide))


def make_layer(name: str) -> LayerProfile:
    """A layer that takes a millisecond a row."""
    return LayerProfile(
        name=name,
        forward_s=(1e-3,),
        backward_s=(2e-3,),
        output_bytes=1e5,
        saved_bytes=1e6,
        parameter_bytes=4 << 20,
    )


def make_case(case: Case) -> tuple[Plan, Profile, Cluster]:
    """Equal stages on neighbouring devices, a row a microbatch and replica."""
    cluster = make_hosts(sum(case.replicas))
    layers, stages, first = [], [], 0
    for number, count in enumerate(case.replicas):
        layers.append(make_layer(f"l{number}"))
        devices, versions = cluster.device_ids[first : first + count], case.versions[number] if case.versions else 1
        stages.append(Stage(layers=(f"l{number}",), devices=devices, num_buckets=4, versions=versions))
        first += count
    batch = case.num_microbatches * max(case.replicas)
    plan = Plan(model="even", stages=tuple(stages), batch=batch, num_microbatches=case.num_microbatches)
    profile = Profile(model="even", device="cpu", source="analytic", batch_sizes=(1,), layers=tuple(layers))
    return plan, profile, cluster


def best_s(*calls: Callable[[], object]) -> list[float]:
    """The processor's seconds of the fastest of several calls of each, which take turns."""
    best, until = [float("inf")] * len(calls), time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for number, call in enumerate(calls):
            with no_collection():
                began = time.process_time()
                call()
                best[number] = min(best[number], time.process_time() - began)
    return best


def measure(case: Case) -> str:
    """One line of the table."""
    plan, profile, cluster = make_case(case)
    schedule = make_schedule(plan)
    program = make_program(schedule, profile, cluster)
    actions = case.num_batches * sum(map(len, schedule.orders))
    whole = partial(simulate, schedule, profile, cluster, num_batches=case.num_batches)
    found = best_s(
        lambda: Engine(program, case.num_batches).run(),
        partial(whole, detail=False),
        whole,
        lambda: list(whole().spans),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    rates = " ".join(f"{actions / seconds:>12,.0f}" for seconds in found)
    return (
        f"{case.name:<19} {case.num_microbatches:>12} {case.num_batches:>7} {actions:>9,} {rates} "
        f"{found[2]:>8.2f} {peak:>8.2f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave the largest case out")
    cases = CASES[:-1] if parser.parse_args().quick else CASES
    heads = ("events only", "no detail", "simulate", "spans read")
    print(
        f"{'replicas':<19} microbatches batches   actions {''.join(f'{head:>13}' for head in heads)[1:]}  seconds  GiB"
    )
    print(" " * 50 + "    actions/s" * len(heads))
    for case in cases:
        print(measure(case), flush=True)


if __name__ == "__main__":
    main()
