"""How fast the simulator is: actions a second on one core, and the memory that the largest case takes.

python benchmarks/simulator.py            a table of all cases, the largest with 1,024 devices
python benchmarks/simulator.py --quick    the small ones only
"""

from __future__ import annotations

import argparse
import resource
import time

from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.plan import Plan, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from stagewright.simulation.engine import Engine
from stagewright.simulation.program import make_program

CASES = ((1, 8, 64, 4), (8, 1, 512, 4), (4, 8, 64, 4), (4, 16, 128, 2), (16, 64, 64, 1))
"""Stages, replicas of each, microbatches, batches."""
DEVICES_A_HOST = 8


def make_hosts(num_devices: int) -> Cluster:
    """Hosts of eight devices behind one network card each."""
    links = [Link(ends=(str(n), "switch"), kind="PIX", bytes_per_s=12e9, latency_s=1e-6) for n in range(DEVICES_A_HOST)]
    links.append(Link(ends=("switch", "nic"), kind="PHB", bytes_per_s=12e9, latency_s=1e-6))
    host = Host(devices=(Device(kind="d", memory_bytes=1 << 40),) * DEVICES_A_HOST, links=tuple(links))
    count = -(-num_devices // DEVICES_A_HOST)
    wide = (Link(ends=(f"{n}:nic", "net"), kind="NET", bytes_per_s=12e9, latency_s=2e-6) for n in range(count))
    return Cluster(name="many", hosts=(host,) * count, links=tuple(wide))


def make_case(stages: int, replicas: int, microbatches: int) -> tuple[Plan, Profile, Cluster]:
    """Equal stages on neighbouring devices, a row a microbatch and replica."""
    cluster = make_hosts(stages * replicas)
    ids = cluster.device_ids
    layers = tuple(
        LayerProfile(
            name=f"l{number}",
            forward_s=(1e-3,),
            backward_s=(2e-3,),
            output_bytes=1e5,
            saved_bytes=1e6,
            parameter_bytes=4 << 20,
        )
        for number in range(stages)
    )
    placed = tuple(
        Stage(layers=(f"l{n}",), devices=ids[n * replicas : (n + 1) * replicas], num_buckets=4) for n in range(stages)
    )
    plan = Plan(model="even", stages=placed, batch=microbatches * replicas, num_microbatches=microbatches)
    profile = Profile(model="even", device="d", source="analytic", batch_sizes=(1,), layers=layers)
    return plan, profile, cluster


def measure(stages: int, replicas: int, microbatches: int, batches: int) -> str:
    """One line of the table; seconds are those of the processor."""
    plan, profile, cluster = make_case(stages, replicas, microbatches)
    schedule = make_schedule(plan)
    program = make_program(schedule, profile, cluster)
    actions = batches * sum(map(len, schedule.orders))
    began = time.process_time()
    Engine(program, batches).run()
    engine_s = time.process_time() - began
    began = time.process_time()
    simulate(schedule, profile, cluster, num_batches=batches, detail=False)
    whole_s = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return (
        f"{stages:>6} {replicas:>8} {microbatches:>12} {batches:>7} {actions:>9,} {actions / engine_s:>12,.0f} "
        f"{actions / whole_s:>12,.0f} {whole_s:>8.2f} {peak:>8.2f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave the largest case out")
    cases = CASES[:-1] if parser.parse_args().quick else CASES
    print("stages replicas microbatches batches   actions  events only     simulate  seconds  GiB RSS")
    print("                                               actions/s     actions/s")
    for case in cases:
        print(measure(*case), flush=True)


if __name__ == "__main__":
    main()
