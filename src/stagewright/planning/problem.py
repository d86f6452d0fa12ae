"""What there is to decide: the cuts, devices and settings that the options leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product

from stagewright.cluster import parse_placement
from stagewright.cost import Costs
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, ROUTES, Plan, Policy, Route
from stagewright.planning.estimate import Estimator, Shortage
from stagewright.planning.groups import FLUSHED, ClusterRates, Setting
from stagewright.planning.options import PlanOptions
from stagewright.planning.quick import Candidate, joined, moved_cuts, moved_devices, swapped_devices
from stagewright.planning.ratio import cut_by_names, cut_by_ratio, table_of
from stagewright.planning.spaces import Devices
from stagewright.policy import DISTINCT, RULES, held_before

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

    def around(self, here: Candidate) -> Iterator[Candidate]:
        """The candidate with one thing changed, of what is open."""
        yield from (here._replace(setting=setting) for setting in self.near(here.setting) if setting != here.setting)
        if not self.every_cut:
            yield from moved_cuts(here, self.cuts)
            yield from moved_cuts(here, self.cuts, together=2)
        if self.groups is None:
            yield from moved_devices(here)
            yield from swapped_devices(here, self.costs.cluster.device_ids, self.shared.twins)
        if self.is_free:
            yield from joined(here)

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
    cuts, every = _find_cuts(costs, options, batch)
    _check_stages(cuts, every, groups, options)
    return Problem(costs, options, batch, cuts, every, groups, ClusterRates(costs), {})


def _find_cuts(costs: Costs, options: PlanOptions, batch: int) -> tuple[tuple[int, ...], bool]:
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
