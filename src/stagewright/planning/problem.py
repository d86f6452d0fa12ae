"""What there is to decide: the cuts, devices and settings that the options leave open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.cluster import parse_placement
from stagewright.cost import Costs
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, ROUTES, Route
from stagewright.planning.estimate import Estimator, Shortage
from stagewright.planning.groups import Setting, Shared
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import cut_by_names, cut_by_ratio, table_of
from stagewright.planning.spaces import Devices
from stagewright.policy import held_before

MAX_MICROBATCHES = 64
"""The search tries 1, 2, 4 … up to so many."""
ANY_STALENESS = "any"


@dataclass(frozen=True)
class Problem:
    """A profile on a cluster, and what is open."""

    costs: Costs
    options: PlanOptions
    batch: int
    cuts: tuple[int, ...]
    """Where stages may begin and end, from 0 to the number of layers."""
    every_cut: bool
    """Whether all of them must be made."""
    groups: tuple[Devices, ...] | None
    """The devices of each stage, where a placement gives them."""
    shared: Shared
    estimators: dict[Setting, Estimator]

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of microbatches to try."""
        if self.options.num_microbatches is not None:
            return (self.options.num_microbatches,)
        return tuple(2**power for power in range(10) if 2**power <= min(self.batch, MAX_MICROBATCHES))

    @property
    def stalenesses(self) -> tuple[str, ...]:
        """The ways to keep versions to try; none but exact training unless it is allowed."""
        wish = self.options.staleness or "0"
        return ("0", "ssp", "2bw") if wish == ANY_STALENESS else (wish,)

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes to try."""
        return ROUTES if self.options.route is None else (self.options.route,)

    def setting(self, count: int, route: Route, staleness: str) -> Setting:
        """One setting of those to try."""
        return Setting(
            batch=self.batch,
            num_microbatches=count,
            route=route,
            policy=self.options.policy or DEFAULT_POLICY,
            hold=self.options.hold,
            recompute=self.options.recompute,
            staleness=staleness,
        )

    def settings(self) -> tuple[Setting, ...]:
        """All of them; routes do not differ where a batch has one microbatch."""
        found = []
        for staleness in self.stalenesses:
            for count in self.counts:
                routes = self.routes[:1] if count == 1 else self.routes
                found += [self.setting(count, route, staleness) for route in routes]
        return tuple(found)

    def plain_settings(self) -> tuple[Setting, ...]:
        """Those of them that train exactly, or would."""
        return tuple(dict.fromkeys(replace(setting, staleness="0") for setting in self.settings()))

    def estimator(self, setting: Setting) -> Estimator:
        """The estimator of a setting, made at the first call."""
        if setting not in self.estimators:
            self.estimators[setting] = Estimator(self.costs, setting, self.shared)
        return self.estimators[setting]

    @property
    def shortage(self) -> Shortage | None:
        """The stage that came closest to fitting of all that did not."""
        found = [each.shortage for each in self.estimators.values() if each.shortage is not None]
        return min(found, key=lambda short: short.need_bytes / short.has_bytes, default=None)

    def data_parallel_shortage(self, devices: Devices) -> Shortage | None:
        """What data parallelism lacks, in the setting where it lacks least."""
        whole = (0, len(self.costs.profile.layers))
        found = []
        for setting in self.plain_settings():
            held = held_before(setting, len(devices), 0, 0, 1)
            short = self.estimator(setting).fullest(*whole, devices, held, 1, setting.recompute is not False)[1]
            found += [short] if short is not None else []
        return min(found, key=lambda short: short.need_bytes / short.has_bytes, default=None)


def make_problem(costs: Costs, options: PlanOptions) -> Problem:
    """The problem that the options pose; parts that contradict one another are refused."""
    groups = None if options.placement is None else parse_placement(options.placement, costs.cluster)
    if groups is None and options.batch_per_device is not None:
        raise UsageError(
            "--batch-per-device needs to know the first stage's replicas, which the search is to find",
            "give --batch ROWS, or fix them with --placement",
        )
    batch = options.rows(len(groups[0]) if groups else 1)
    if options.num_microbatches is not None and options.num_microbatches > batch:
        raise PlanError(f"--microbatches is {options.num_microbatches}, but the batch has {batch} rows")
    cuts, every = find_cuts(costs, options, batch)
    _check_stages(cuts, every, groups, options)
    return Problem(costs, options, batch, cuts, every, groups, Shared(costs), {})


def find_cuts(costs: Costs, options: PlanOptions, batch: int) -> tuple[tuple[int, ...], bool]:
    """Where stages may begin and end, and whether all of these cuts must be made."""
    profile = costs.profile
    ends = (0, len(profile.layers))
    allowed = [number for number in range(1, len(profile.layers)) if profile.layers[number].cuttable]
    if options.cut:
        chosen = cut_by_names(profile.names, options.cut)
    elif options.shares is not None:
        chosen = cut_by_ratio(table_of(profile, batch).costs(options.ratio_of), options.shares)
    else:
        return (ends[0], *allowed, ends[1]), False
    for cut in chosen:
        if cut not in allowed:
            raise PlanError(
                f"no stage may begin at {profile.names[cut]}: it shares weights with an earlier layer",
                "cut elsewhere, or give each its own weights",
            )
    return (ends[0], *chosen, ends[1]), True


def _check_stages(cuts: tuple[int, ...], every: bool, groups: tuple[Devices, ...] | None, options: PlanOptions) -> None:
    num_groups = None if groups is None else len(groups)
    if num_groups is not None and every and len(cuts) - 1 != num_groups:
        raise UsageError(
            f"{'--cut' if options.cut else '--ratio'} makes {len(cuts) - 1} stages, but the placement has {num_groups}",
            "give as many stages to both",
        )
    if num_groups is not None and len(cuts) - 1 < num_groups:
        raise PlanError(f"{len(cuts) - 1} layers cannot be cut into the placement's {num_groups} stages")
