"""A model or a plan with what else its simulation needs to know; where no profile is given, one is worked out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stagewright.cluster import Cluster, parse_placement
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.profile import Precision, Profile
from stagewright.record import Record
from stagewright.simulation.run import IMAGENET_IMAGES, simulate
from stagewright.simulation.whatif import fastest_schedule


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate, whatever the cluster: a plan, or a model of which the options make one."""

    model: str
    plan: Plan | None = None
    profile: Profile | None = None
    """By default an analytic one of the cluster's first kind of device."""
    precision: Precision = "fp32"
    states: Callable[[str], float] | None = None
    """How many numbers the optimizer keeps for each number of a parameter, by its role; one if left out."""
    data: str = "synthetic"
    epoch_images: int | None = IMAGENET_IMAGES

    def record(self, cluster: Cluster, options: PlanOptions, *, detail: bool = True, name: str = "") -> Record:
        """The simulation on a cluster, under a plan as the options have it."""
        profile = self.profile or self.analytic(cluster, self.rows(cluster, options))
        profile = profile if self.states is None else profile.with_states(self.states)
        own = self.plan
        made = (
            fixed_plan(profile, options, cluster)
            if own is None
            else replace(own, batch=options.batch or own.batch, hold=options.hold or own.hold)
        )
        agree = self.precision == "fp16" or profile.precision == "fp16"
        schedule = fastest_schedule(made, profile, cluster, agree=agree, data=self.data)
        return simulate(
            schedule, profile, cluster, data=self.data, epoch_images=self.epoch_images, detail=detail, name=name
        )

    def rows(self, cluster: Cluster, options: PlanOptions) -> tuple[int, ...]:
        """Numbers of rows to profile: a first-stage replica's, a quarter of them, and a whole microbatch."""
        if self.plan is not None:
            first, batch, count = self.plan.replicas[0], options.batch or self.plan.batch, self.plan.num_microbatches
        else:
            first = len(parse_placement(options.placement or "", cluster)[0])
            batch, count = options.rows(first), options.num_microbatches or 1
        whole = max(batch // count, 1)
        share = max(whole // first, 1)
        return tuple(sorted({max(share // 4, 2), max(share, 2), max(whole, 2)}))

    def analytic(self, cluster: Cluster, sizes: tuple[int, ...]) -> Profile:
        """A profile of the cluster's kind of device, from shapes alone."""
        # Only this needs torch, which takes seconds to import.
        from stagewright.profiling.analytic import profile_for

        return profile_for(cluster, self.model, sizes, self.precision)
