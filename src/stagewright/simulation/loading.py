"""Data loading: a host decodes images at its own rate, one batch ahead of the forward that uses them."""

from __future__ import annotations

from itertools import accumulate

from stagewright.cluster import Cluster
from stagewright.plan import Plan


class Loader:
    """When a host's images of a microbatch are decoded; at once where its decode rate is not known.

    decode   │ batch 0 │ batch 1 │   │ batch 2 │        batch n + 1 is decoded from the first forward of batch n on
    forward            │ F0          │ F1
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        devices, self._seconds = plan.stages[0].devices, dict[int, list[float]]()
        """Host by host how long a batch is decoded until each of its microbatches is there."""
        shares = [plan.shares(0, microbatch) for microbatch in range(plan.num_microbatches)]
        for host in {id.host for id in devices}:
            rate = cluster.hosts[host].decode_images_per_s
            if rate is not None:
                own = ([share for share in each if devices[share.replica].host == host] for each in shares)
                rows = (sum(share.stop - share.start for share in each) for each in own)
                self._seconds[host] = list(accumulate(count / rate for count in rows))
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
