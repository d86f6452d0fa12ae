"""A card cut into slices whose workers talk over loopback: what `rehearsal.py` measures on a card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stagewright.plan import Plan
from stagewright.rehearsal.slices import check_card
from stagewright.runtime.common_memory import APART
from stagewright.runtime.launch.mps import shared_cards


@dataclass(frozen=True)
class Slices:
    """Workers that share one card and talk over loopback, as hosts of one worker each."""

    number: int
    shared: Mapping[str, str]
    """What makes them slices; nothing for workers on the CPU."""

    @property
    def device(self) -> str:
        return "cuda" if self.shared else "cpu"

    @property
    def addresses(self) -> Sequence[str]:
        return ("127.0.0.1",) * self.number

    def used(self, plan: Plan) -> Sequence[int]:
        return range(len(plan.devices))

    def enter(self, host: int) -> None:
        """Stays where it is: slices are all here."""

    def environment(self) -> Mapping[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo", APART: "1", **self.shared}


@contextmanager
def sliced_card(slices: int) -> Iterator[Slices]:
    """A card that is cut into slices meanwhile."""
    check_card(slices)
    with shared_cards(slices, "nccl") as shared:
        yield Slices(slices, shared)
