"""What there is to decide: the cuts, devices and settings that the options leave open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product

from stagewright.cluster import parse_placement
from stagewright.cost import Costs
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, ROUTES, Plan, Policy, Route
from stagewright.planning.candidates import (
    Candidate,
    Found,
    joined,
    moved_cuts,
    moved_devices,
    price,
    swapped_devices,
)
from stagewright.planning.estimate import Estimator, Shortage
from stagewright.planning.fixed import whole_plan
from stagewright.planning.groups import FLUSHED, ClusterRates, Devices, Setting
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import LayerTable, given_cuts, table_of
from stagewright.policy import DISTINCT, RULES

_ANY_STALENESS = "any"


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
    table: LayerTable
    shared: ClusterRates
    estimators: dict[Setting, Estimator]

    @property
    def is_free(self) -> bool:
        """Whether neither the devices nor the cuts are given."""
        return self.groups is None and not self.every_cut

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of microbatches to try."""
        if self.options.num_microbatches is not None:
            return (self.options.num_microbatches,)
        return tuple(count for count in (1, 2, 4, 8, 16, 32, 64) if count <= self.batch)

    @property
    def stalenesses(self) -> tuple[str, ...]:
        """The ways to keep versions to try; none but exact training unless it is allowed."""
        wish = self.options.staleness or FLUSHED
        return (FLUSHED, "ssp", "2bw") if wish == _ANY_STALENESS else (wish,)

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes to try."""
        return ROUTES if self.options.route is None else (self.options.route,)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The orders to try, the default one first."""
        if self.options.policy is not None:
            return (self.options.policy,)
        return (DEFAULT_POLICY, *(policy for policy in DISTINCT if policy != DEFAULT_POLICY))

    def weighed(self, staleness: str) -> tuple[Policy, ...]:
        """Those of the orders that the estimate tells apart; with a flush, by arrival is the default to it."""
        first, *others = self.policies
        rules = ((policy, RULES[policy]) for policy in others)
        return (first, *(p for p, rule in rules if rule.halves or (rule.by_arrival and staleness != FLUSHED)))

    def setting(self, count: int, route: Route, staleness: str, policy: Policy | None = None) -> Setting:
        """One setting of those to try."""
        return Setting(
            batch=self.batch,
            num_microbatches=count,
            route=route,
            policy=policy or self.policies[0],
            hold=self.options.hold,
            recompute=self.options.recompute,
            staleness=staleness,
        )

    def settings(self, *, weighed: bool = False) -> tuple[Setting, ...]:
        """All of them in the first order, or in all that are weighed; with one microbatch routes do not differ."""
        found = []
        for staleness in self.stalenesses:
            policies = self.weighed(staleness) if weighed else self.policies[:1]
            for count in self.counts:
                pairs = product(self.routes[:1] if count == 1 else self.routes, policies)
                found += [self.setting(count, route, staleness, policy) for route, policy in pairs]
        return tuple(found)

    def around(
        self, here: Candidate, settings: Iterable[Setting], *, most_cuts: int = 1, swaps: bool = True
    ) -> Iterator[Candidate]:
        """The candidate with one thing changed, of what is open: cuts, devices, or one of these settings."""
        if not self.every_cut:
            for together in range(1, most_cuts + 1):
                yield from moved_cuts(here, self.cuts, together)
        if self.groups is None:
            yield from moved_devices(here)
            yield from swapped_devices(here, self.costs.cluster.device_ids, self.shared.twins) if swaps else ()
        if self.is_free:
            yield from joined(here)
        yield from (here._replace(setting=setting) for setting in settings if setting != here.setting)

    def near(self, here: Setting) -> Iterator[Setting]:
        """The setting with one thing changed, of what is open: microbatches, route, order, versions."""
        count = here.num_microbatches
        if self.options.num_microbatches is None:
            others = {count // 2, count * 2 // 3, count - 1, count + 1, count * 3 // 2, count * 2} - {count}
            for other in sorted(each for each in others if 1 <= each <= self.batch):
                yield replace(here, num_microbatches=other)
        for route in self.routes if count > 1 else ():
            yield replace(here, route=route)
        for policy in self.policies:
            yield replace(here, policy=policy)
        for staleness in self.stalenesses:
            yield replace(here, staleness=staleness)

    def plain_settings(self) -> tuple[Setting, ...]:
        """Those of them that train exactly, or would."""
        return tuple(dict.fromkeys(replace(setting, staleness=FLUSHED) for setting in self.settings()))

    def candidate(self, plan: Plan) -> Candidate:
        """A plan as something to change."""
        edges = (0, *accumulate(len(stage.layers) for stage in plan.stages))
        known = ((text, self.setting(1, "split", text)) for text in self.stalenesses)
        later = range(len(plan.stages) - 1, -1, -1)
        same = (text for text, each in known if tuple(map(each.versions, later)) == plan.versions)
        setting = self.setting(plan.num_microbatches, plan.route, next(same, FLUSHED), plan.policy)
        return Candidate(edges, tuple(stage.devices for stage in plan.stages), setting)

    def plan(self, found: Found) -> Plan:
        """The whole plan of what a search found."""
        edges, groups, setting = found.candidate
        versions = [setting.versions(later) or 1 for later in reversed(range(len(groups)))]
        buckets, cluster = self.options.num_buckets, self.costs.cluster
        return whole_plan(self.table, edges, groups, setting, versions, found.recompute, buckets, cluster)

    def price(self, candidate: Candidate, below: float = float("inf")) -> Found | None:
        """The estimate of a candidate; None where it does not fit, or is not below."""
        return price(candidate, self.estimator(candidate.setting), below)

    def estimator(self, setting: Setting) -> Estimator:
        """The estimator of a setting, made at the first call."""
        if setting not in self.estimators:
            self.estimators[setting] = Estimator(self.costs, setting, self.shared)
        return self.estimators[setting]

    @property
    def shortage(self) -> Shortage | None:
        """The stage that came closest to fitting of all that did not, so far."""
        found = [each.shortage for each in self.estimators.values() if each.shortage is not None]
        return min(found, key=lambda short: short.ratio, default=None)


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
    table = table_of(costs.profile, batch)
    cuts, every = _find_cuts(costs, table, options, None if groups is None else len(groups))
    return Problem(costs, options, batch, cuts, every, groups, table, ClusterRates(costs), {})


def _find_cuts(
    costs: Costs, table: LayerTable, options: PlanOptions, num_groups: int | None
) -> tuple[tuple[int, ...], bool]:
    """Where stages may begin and end, and whether all of these cuts must be made."""
    layers = costs.profile.layers
    allowed = [number for number in range(1, len(layers)) if layers[number].cuttable]
    if not options.cut and options.shares is None:
        if num_groups is not None and len(allowed) + 1 < num_groups:
            raise PlanError(f"{len(allowed) + 1} layers cannot be cut into the placement's {num_groups} stages")
        return (0, *allowed, len(layers)), False
    chosen = given_cuts(table, options, num_groups)
    for cut in chosen:
        if cut not in allowed:
            raise PlanError(
                f"no stage may begin at {table.names[cut]}: it shares weights with an earlier layer",
                "cut elsewhere, or give each its own weights",
            )
    return (0, *chosen, len(layers)), True
