"""Which contenders of a comparison are in memory at once: as many as fit, in their order.

plan, plan, plan, data parallel │ DDP, pipelining, pipelining        two groups, one after the other
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from stagewright.bench.rounds import Told, family_of
from stagewright.plan import Plan
from stagewright.profile import Profile

FRAMEWORK_BYTES = 350e6
"""What a process has in memory before it has a model."""
FORKED_BYTES = 150e6
"""What one has of its own that was forked of another."""
USED_SHARE = 0.9
"""The share of a machine's free memory that a comparison takes."""
COPIES = 3
"""Of each weight: itself, its gradient and its momentum."""
WITH_BUCKETS = 4
"""Where DDP adds up: after its first step it makes its buckets anew, beside those that hold the gradients."""


def in_groups(contenders: Sequence[Told], profile: Profile, num_hosts: int, free_bytes: float) -> Iterator[list[Told]]:
    """The groups.

    Whoever is too large for any is one by itself. A peer with several numbers of microbatches is a family, never
    parted. Before a worker of a peer keeps its own layers, it has all of the model.
    """
    model_bytes = sum(layer.parameter_bytes for layer in profile.layers)
    left = USED_SHARE * free_bytes - FRAMEWORK_BYTES * (num_hosts + 1) - COPIES * model_bytes
    group: list[Told] = []
    held = 0.0
    for _, members in groupby(contenders, key=family_of):
        # Of a family the fastest stays: at most two are there at once.
        family = list(members)
        own = sum(held_bytes(told, profile, num_hosts) for told in family[:2])
        is_peer = family[0]["kind"] not in ("plan", "alone", "passes")
        most = max(own, float(num_hosts * model_bytes)) if is_peer else own
        if group and held + most > left:
            yield group
            group, held = [], 0.0
        group += family
        held += own
    if group:
        yield group


def held_bytes(told: Told, profile: Profile, num_hosts: int) -> float:
    """What a contender keeps on all hosts together; the single process is counted elsewhere."""
    parameters = {layer.name: layer.parameter_bytes for layer in profile.layers}
    if told["kind"] == "alone":
        return 0.0
    if told["kind"] == "passes":  # its weights are everyone's
        return float(len(told["busy"]) * sum(parameters.values()))
    if told["kind"] == "plan":
        plan = Plan.from_dict(told["plan"])
        return (not plan.is_synchronous) * num_hosts * FORKED_BYTES + sum(
            len(stage.devices) * (COPIES - 1 + stage.versions) * sum(parameters[name] for name in stage.layers)
            for stage in plan.stages
        )
    num_stages = 1 + len(told.get("cuts", ()))
    copies = WITH_BUCKETS if num_hosts > num_stages else COPIES
    return copies * num_hosts / num_stages * sum(parameters.values())


def free_memory() -> float:
    """Bytes that this machine can give out, as Linux counts them; no limit where it is not told."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024.0 if found else float("inf")
