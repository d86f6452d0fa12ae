"""The best of all plans for a small cluster, judged by the simulator: what the planner is measured against.

Every way to hand out the devices, every cut, every number of microbatches of `COUNTS`, every route and every order. A
plan is left out only where its busiest device alone computes for longer than the best plan so far takes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link, format_placement
from stagewright.cost import Costs, handled_by_each
from stagewright.plan import ROUTES, Plan, Policy
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.policy import DISTINCT, RULES
from stagewright.profile import LayerProfile, Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate

MIB, GIB = 1 << 20, 1 << 30
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


class Case(NamedTuple):
    """A model, a small cluster, the rows of a step, and what versions are allowed."""

    profile: Profile
    cluster: Cluster
    batch: int
    staleness: str


def random_case(seed: int) -> Case:
    """Two to four devices of different speeds on wires that differ, three to five layers of all sorts."""
    draw = random.Random(seed)
    num_devices = draw.choice((2, 3, 3, 3, 4))
    num_layers = draw.choice((3, 4, 5, 6) if num_devices < 4 else (3, 4, 5))
    batch, staleness = draw.choice((8, 16, 24)), draw.choice(("0", "0", "ssp", "2bw"))
    return Case(random_profile(draw, num_layers), random_cluster(draw, num_devices), batch, staleness)


def random_mixed_case(seed: int) -> Case:
    """Two to four devices of two or three kinds, each with a profile of its own, and little memory on some of them.

    A layer takes 0.3 to 6 times as long on one kind as on another, and kinds do not agree on which layer is long.
    """
    draw = random.Random(1000 + seed)
    num_devices = draw.choice((2, 3, 3, 4))
    profile = random_profile(draw, draw.choice((3, 4, 5) if num_devices < 4 else (3, 4)))
    kinds = [profile, *(_on_another_kind(draw, profile, name) for name in ("y", "z")[: draw.choice((1, 2))])]
    names = ["x", *(draw.choice(kinds).device for _ in range(num_devices - 1))]
    memories = [draw.choice((100, 300, 2000)) * MIB for _ in names]
    fresh = iter(Device(kind=name, memory_bytes=memory) for name, memory in zip(names, memories))
    cluster = random_cluster(draw, num_devices)
    hosts = tuple(replace(host, devices=tuple(next(fresh) for _ in host.devices)) for host in cluster.hosts)
    batch, staleness = draw.choice((8, 16)), draw.choice(("0", "0", "ssp"))
    return Case(Profile.of_kinds(kinds), replace(cluster, hosts=hosts), batch, staleness)


def _on_another_kind(draw: random.Random, profile: Profile, name: str) -> Profile:
    def slowed(layer: LayerProfile) -> LayerProfile:
        factor = draw.uniform(0.3, 6)
        return layer.with_times({key: tuple(each * factor for each in times) for key, times in layer.timed.items()})

    return replace(profile, device=name, layers=tuple(map(slowed, profile.layers)))


def random_profile(draw: random.Random, num_layers: int) -> Profile:
    """Layers that take as long as one another or much longer, with few weights or many."""
    layers = []
    for number in range(num_layers):
        forward_s, per_row = draw.uniform(0.002, 0.02), draw.uniform(0.2, 0.9)
        backward_s = forward_s * draw.uniform(1.5, 2.5)
        layers.append(
            LayerProfile(
                name=f"l{number}",
                kind=draw.choice(("matmul", "conv", "conv")),
                forward_s=(forward_s * (1 - 0.75 * per_row), forward_s),
                backward_s=(backward_s * (1 - 0.75 * per_row), backward_s),
                weight_share=draw.uniform(0.3, 0.6),
                output_bytes=draw.choice((1e4, 1e5, 1e6)),
                saved_bytes=draw.choice((1e5, 1e6)),
                parameter_bytes=draw.choice((0, MIB, 10 * MIB, 60 * MIB)),
            )
        )
    optimizer_s = draw.uniform(0, 0.005)
    sizes = {"batch_sizes": (4, 16), "layers": tuple(layers), "optimizer_s": optimizer_s}
    return Profile(model="random", device="x", source="analytic", **sizes)


def random_cluster(draw: random.Random, num_devices: int) -> Cluster:
    """One hub, or two hosts with a wire between them; speeds from half to double."""
    devices = tuple(
        Device(kind="x", memory_bytes=draw.choice((2, 16)) * GIB, speed=draw.choice((0.5, 1.0, 1.0, 2.0)))
        for _ in range(num_devices)
    )
    rate = draw.choice((2e8, 1e9, 5e9))
    if num_devices < 4 or draw.random() < 0.5:
        return Cluster(name="hub", hosts=(_host(draw, devices, rate),))
    hosts = tuple(_host(draw, some, rate) for some in (devices[:2], devices[2:]))
    return Cluster(name="two", hosts=hosts, links=(Link(ends=("0:hub", "1:hub"), kind="NET", bytes_per_s=rate / 2),))


def _host(draw: random.Random, devices: tuple[Device, ...], rate: float) -> Host:
    rates = (rate * draw.choice((1.0, 1.0, 0.3)) for _ in devices)
    ends = ((str(number), "hub") for number in range(len(devices)))
    links = (Link(ends=pair, kind="wire", bytes_per_s=each, latency_s=2e-5) for pair, each in zip(ends, rates))
    return Host(devices=devices, links=tuple(links))


def every_placement(devices: tuple[DeviceId, ...], most_stages: int) -> Iterator[tuple[tuple[DeviceId, ...], ...]]:
    """Each device in one stage or in none, each stage with a device."""
    for num_stages in range(1, min(len(devices), most_stages) + 1):
        for places in product(range(num_stages + 1), repeat=len(devices)):
            groups = tuple(tuple(id for id, place in zip(devices, places) if place == n) for n in range(num_stages))
            if all(groups):
                yield groups


def every_plan(case: Case) -> Iterator[Plan]:
    """All plans of the space in one order; routes differ only where a stage has replicas and a batch microbatches."""
    names = case.profile.names
    counts = [count for count in COUNTS if count <= case.batch]
    for groups in every_placement(case.cluster.device_ids, len(names)):
        for cut in combinations(names[1:], len(groups) - 1):
            options = PlanOptions(
                batch=case.batch, placement=format_placement(groups), cut=cut, staleness=case.staleness
            )
            plan = fixed_plan(case.profile, options, case.cluster)
            for count, route in product(counts, ROUTES if max(plan.replicas) > 1 else ROUTES[:1]):
                if count > 1 or route == ROUTES[0]:
                    yield replace(plan, num_microbatches=count, route=route)


def busiest_s(plan: Plan, policy: Policy, costs: Costs) -> float:
    """For how long the busiest device computes in a step: no step is shorter."""
    total = dict.fromkeys(plan.devices, 0.0)
    first = 0
    for number, stage in enumerate(plan.stages):
        last = first + len(stage.layers)
        handled = handled_by_each(policy, plan.route, plan.num_microbatches, len(stage.devices))
        shares = (share for microbatch in range(plan.num_microbatches) for share in plan.shares(number, microbatch))
        for (replica, rows), count in Counter((one.replica, one.stop - one.start) for one in shares).items():
            device = costs.cluster.device(stage.devices[replica])
            turn_s = sum(costs.on(device).seconds(first, last, rows, device.speed, handled=handled)[:2])
            total[stage.devices[replica]] += count * turn_s
        for id in stage.devices:
            device = costs.cluster.device(id)
            total[id] += costs.on(device).optimizer_s(first, last, device.speed, versions=stage.versions)
        first = last
    return max(total.values())


def simulated_s(plan: Plan, case: Case, costs: Costs) -> float:
    """The plan's step; endless where it does not fit."""
    record = simulate(make_schedule(plan), case.profile, case.cluster, detail=False, costs=costs)
    uses = ((use.peak_bytes, case.cluster.device(DeviceId.parse(use.device))) for use in record.devices)
    return record.median_step_s if all(held <= device.memory_bytes for held, device in uses) else float("inf")


@cache
def best_of_all(seed: int, made: Callable[[int], Case] = random_case) -> tuple[float, Plan]:
    """The fastest plan of a random case, and its step; endless where none fits."""
    case = made(seed)
    costs = Costs(case.profile, case.cluster)
    alike = [[policy for policy in DISTINCT if RULES[policy].halves is halves] for halves in (False, True)]
    least = [(busiest_s(plan, some[0], costs), plan, some) for plan in every_plan(case) for some in alike]
    best_s, best = float("inf"), least[0][1]
    for bound_s, plan, policies in sorted(least, key=lambda entry: entry[0]):
        for policy in policies if bound_s < best_s else ():
            other = replace(plan, policy=policy)
            step_s = simulated_s(other, case, costs)
            if step_s < bound_s * (1 - 1e-6):
                raise AssertionError(f"a device computes for {bound_s} s in a step of {step_s} s: {other}")
            if step_s < best_s:
                best_s, best = step_s, other
    return best_s, best
