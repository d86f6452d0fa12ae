"""Replicas of a stage have the same weights to the bit: every so many steps their hashes are compared.

    worker 1   after step 100: its hash ──▶ store         nobody waits for anybody
    worker 0   after step 200: looks at what all left after step 100

A bit that flips in a device's memory, or a device that rounds otherwise, makes a replica train another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from stagewright.plan import Plan
from stagewright.runtime.replica import Replica
from stagewright.runtime.timing import AsyncScalars
from stagewright.runtime.world import Words


class ReplicaCheck:
    """One worker's part of the comparison."""

    def __init__(
        self, plan: Plan, words: Words, scalars: AsyncScalars, every: int, tell: Callable[[str, str], object]
    ) -> None:
        self._plan, self._words, self._scalars, self._every, self._tell = plan, words, scalars, every, tell
        self._told: set[tuple[int, frozenset[int]]] = set()
        self._own: dict[int, int] = {}
        """By stage the last step of which hashes were left, where they are this worker's to compare."""

    def after_update(self, here: Replica, batch: int) -> None:
        """Leaves the hash of a stage's weights where it is due, and compares those that were left the time before."""
        step, members = batch + 1, self._plan.workers[here.stage]
        if step % self._every or len(members) == 1:
            return
        self._compare(here.stage)
        key = self._key(here.stage, members[here.replica], step)
        here.reducer.settle()
        self._scalars.read(_hash(here.weights.newest_parameters), partial(self._leave, key, step))
        if here.replica == 0:
            self._own[here.stage] = step

    def close(self) -> None:
        """Compares the last hashes, which all have left by now."""
        for stage in list(self._own):
            self._compare(stage)

    def _key(self, stage: int, worker: int, step: int) -> str:
        return f"weights/{stage}/{worker}/{step // self._every % 2}"  # one may be a step ahead

    def _leave(self, key: str, step: int, numbers: Iterable[float]) -> None:
        self._words.put(key, " ".join(map(str, (step, *numbers))))

    def _compare(self, stage: int) -> None:
        """Names the replicas of a stage whose weights are not those of most."""
        if stage not in self._own:
            return
        step, members = self._own.pop(stage), self._plan.workers[stage]
        left = {worker: self._words.get(self._key(stage, worker, step)) for worker in members}
        found = {worker: text for worker, text in left.items() if text is not None and text.split()[0] == str(step)}
        ((usual, number),) = Counter(found.values()).most_common(1) or [("", 0)]
        others = frozenset(worker for worker, text in found.items() if text != usual)
        if not others or (stage, others) in self._told:
            return
        self._told.add((stage, others))
        who = ", ".join(f"{worker} (device {self._plan.devices[worker]})" for worker in sorted(others))
        if 2 * number > len(found):
            same = ", ".join(str(worker) for worker in found if worker not in others)
            text = f"worker {who} has other weights of stage {stage} after step {step} than {same}"
        else:
            text = f"workers {', '.join(map(str, found))} have different weights of stage {stage} after step {step}"
        self._tell("replicas", f"{text}, to the bit, which devices of one kind should not: see that memory is sound")


@torch.no_grad()
def _hash(tensors: Iterable[Tensor]) -> Tensor:
    """A hash of the bits of some tensors: two sums of whole numbers, the same for the same bits whatever the order."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        # Piece by piece: the squares take memory.
        for piece in torch.split(tensor.detach().reshape(-1), 1 << 22):
            bits = piece.view(kinds[piece.element_size()])
            sums.append(torch.stack([bits.sum(dtype=torch.int64), (bits * bits).sum(dtype=torch.int64)]))
    return torch.stack(sums).sum(0) if sums else torch.zeros(2, dtype=torch.int64)
