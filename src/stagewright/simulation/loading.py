"""Data loading: a host decodes images at its own rate, one batch ahead of the forward that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from stagewright.cluster import Cluster
from stagewright.plan import Plan


class Loader:
    """When a host's images of a microbatch are decoded.

    decode   │ batch 0 │ batch 1 │   │ batch 2 │        batch n + 1 is decoded from the first forward of batch n on
    forward            │ F0          │ F1
    """

    def __init__(self, rows: Mapping[int, Sequence[int]], images_per_s: Mapping[int, float]) -> None:
        self._seconds = {
            host: tuple(accumulate(count / images_per_s[host] for count in counts)) for host, counts in rows.items()
        }
        self._began: dict[tuple[int, int], float] = {}
        self._until: dict[tuple[int, int], float] = {}

    def ready_s(self, host: int, batch: int, microbatch: int) -> float:
        """When the rows of a microbatch that belong to a host are there."""
        seconds = self._seconds.get(host)
        return 0.0 if seconds is None else self._start_s(host, batch) + seconds[microbatch]

    def _start_s(self, host: int, batch: int) -> float:
        if batch == 0:
            return 0.0
        before = self._until.setdefault((host, batch - 1), self._start_s(host, batch - 1) + self._seconds[host][-1])
        return max(before, self._began.get((host, batch - 1), 0.0))

    def began(self, host: int, batch: int, now_s: float) -> None:
        """A worker of the host begins a batch's forward: its buffer is free for the next batch."""
        self._began.setdefault((host, batch), now_s)


def make_loader(plan: Plan, cluster: Cluster) -> Loader | None:
    """The loader of a plan's first stage; None where no host's decode rate is known."""
    hosts = {id.host for id in plan.stages[0].devices}
    rates = {host: cluster.hosts[host].decode_images_per_s for host in hosts}
    known = {host: rate for host, rate in rates.items() if rate is not None}
    rows = {host: [0] * plan.num_microbatches for host in known}
    for microbatch in range(plan.num_microbatches):
        for share in plan.shares(0, microbatch):
            host = plan.stages[0].devices[share.replica].host
            if host in rows:
                rows[host][microbatch] += share.stop - share.start
    return Loader(rows, known) if known else None
