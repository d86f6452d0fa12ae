"""What plans cost, and which to take: the cheapest plan on some devices is the fastest on them; and one device more."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import Literal

from stagewright.cluster import Cluster, DeviceId, Devices, plain_kind
from stagewright.errors import ClusterError, PlanError, UsageError
from stagewright.planning.search import Search, shape

Objective = Literal["time", "cost", "time-under-cost"]
_cost = attrgetter("best.cost")


def choose(
    planned: Callable[..., Search], cluster: Cluster, objective: Objective = "time", max_cost: float | None = None
) -> tuple[Search, tuple[Search, ...]]:
    """What `planned` finds, which is `make_plan` told all but the devices, and the curve of time and cost."""
    if (objective == "time-under-cost") != (max_cost is not None):
        wrong = f"--objective {objective} {'needs' if max_cost is None else 'goes without'} --max-cost"
        raise UsageError(wrong, "give --objective time-under-cost with --max-cost X, what a million samples may cost")
    if objective == "time":
        return planned(), ()
    if lost := [id for id in cluster.device_ids if cluster.device(id).price_per_h is None]:
        wrong = f"{cluster.name} does not say what {lost[0]} ({cluster.device(lost[0]).kind}) costs"
        raise ClusterError(wrong, "add price_per_h to each device in the cluster file")
    here, found = cluster.device_ids, {cluster.device_ids: planned()}
    while fewer := _fewer(here, cluster):
        for devices in fewer:
            with suppress(PlanError):  # it does not fit
                found[devices] = planned(devices=devices)
        here = min(fewer, key=lambda devices: _cost(found[devices]) if devices in found else math.inf)
    ordered = sorted(found.values(), key=lambda each: (each.best.step_s, _cost(each)))
    least = accumulate(map(_cost, ordered), min, initial=math.inf)
    curve = tuple(each for each, before in zip(ordered, least) if _cost(each) < before)
    taken = next((each for each in curve if _cost(each) <= (max_cost or _cost(curve[-1]))), None)
    if taken is None:
        wrong = f"no plan trains a million samples for {max_cost:g} or less: the cheapest costs {_cost(curve[-1]):.4g}"
        raise PlanError(wrong, "raise --max-cost, or add cheaper devices to the cluster file")
    reason = f"{shape(taken.best.plan)} trains a million samples for {_cost(taken):.3g}."
    plan = replace(taken.best.plan, notes=(reason, *taken.best.plan.notes[1:]))
    return replace(taken, best=replace(taken.best, plan=plan), reason=reason), curve


def _fewer(devices: Devices, cluster: Cluster) -> list[Devices]:
    """Without the last one of each sort; of many an eighth of all at once."""
    kinds = {id: cluster.device(id) for id in devices}
    sorts = ([id for id in devices if kinds[id] == kind] for kind in dict.fromkeys(kinds.values()))
    out = (some[-max(len(devices) // 8, 1) :] for some in sorts)
    return list(filter(None, (tuple(id for id in devices if id not in each) for each in out)))


def with_one_more(cluster: Cluster, kind: str) -> Cluster:
    """The cluster with a device more of a kind, on the first host that has one, wired like the last one there."""
    ids = [id for id in cluster.device_ids if plain_kind(cluster.device(id).kind) == kind]
    old, plain = max(id for id in ids if id.host == ids[0].host), cluster.to_dict()
    host = plain["hosts"][old.host]
    fresh = DeviceId(old.host, len(host["devices"]))
    host["devices"].append(host["devices"][old.device])
    inside = (host["links"], str(old.device), str(fresh.device))
    for links, here, there in (inside, (plain["links"], str(old), str(fresh))):
        like = [link for link in links if here in link["ends"]]
        links += [{**link, "ends": [there if end == here else end for end in link["ends"]]} for link in like]
    return Cluster.from_dict(plain)
