"""Suites of measured comparisons: the file's cases, each a model on emulated hosts or on slices of one card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import StagewrightError, UsageError
from stagewright.noun import Saved, noun
from stagewright.plan import Policy, Route
from stagewright.planning.options import PlanOptions
from stagewright.rehearsal.slices import slice_cluster


@noun(error=UsageError)
class Wanted:
    """One plan that a case runs beside the planner's choice."""

    placement: str = ""
    cut: tuple[str, ...] = ()
    microbatches: int = Field(default=1, ge=1)
    schedule: Policy | None = None
    staleness: str | None = None
    route: Route | None = None
    buckets: int | None = Field(default=None, ge=1)

    def options(self, batch: int) -> PlanOptions:
        """As the planner takes them."""
        return PlanOptions(
            batch=batch, placement=self.placement, cut=self.cut, num_microbatches=self.microbatches,
            staleness=self.staleness, policy=self.schedule, route=self.route, num_buckets=self.buckets,
        )  # fmt: skip


@noun(error=UsageError)
class RehearsalCase:
    """One model on one set of emulated hosts, or on slices of one card."""

    name: str
    model: str
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Of the model, such as image_size."""
    batch: int = Field(ge=1)
    cluster: str | None = None
    bits_per_s: tuple[float, ...] = ()
    """The rates of every host's link, in place of the cluster file's: one case each."""
    slices: int | None = Field(default=None, ge=2)
    """So many slices of the card of this machine, in place of a cluster."""
    batch_sizes: tuple[int, ...] = Field(min_length=2)
    """The rows at which layers are timed."""
    plans: tuple[Wanted, ...] = Field(min_length=1)
    """Beside the planner's choices; its runners-up make up three others where these are fewer."""
    is_short: bool = False
    """Whether `--short` runs it, at the first of the rates."""

    def __post_init__(self) -> None:
        if (self.cluster is None) != (self.slices is not None) or (self.cluster is None) != (not self.bits_per_s):
            raise UsageError(f"case {self.name}: expected cluster and bits_per_s, or slices")

    @property
    def device(self) -> str:
        """What it computes on."""
        return "cpu" if self.slices is None else "cuda"

    def each_rate(self) -> Iterator[RehearsalCase]:
        """The case at each of its rates: alexnet-4 at 300 Mbit/s is alexnet-4-300mbit; slices have but one."""
        if self.slices is not None:
            yield self
        for number, rate in enumerate(self.bits_per_s):
            text = f"{rate / 1e9:g}gbit" if rate >= 1e9 else f"{rate / 1e6:g}mbit"
            short = self.is_short and number == 0
            yield replace(self, name=f"{self.name}-{text}", bits_per_s=(rate,), is_short=short)

    def hosts(self) -> Cluster:
        """The cluster, with the (first) rate of the case."""
        if self.cluster is None:
            return slice_cluster(self.slices or 0)
        cluster = find_cluster(self.cluster)
        rate = self.bits_per_s[0] / 8
        return replace(cluster, links=tuple(replace(link, bytes_per_s=rate) for link in cluster.links))


@noun(error=UsageError)
class RehearsalSuite(Saved):
    """Cases of a measured comparison."""

    FORMAT: ClassVar[str] = "stagewright.rehearsal"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str
    rounds: int = Field(default=5, ge=1)
    cases: tuple[RehearsalCase, ...] = Field(min_length=1)
