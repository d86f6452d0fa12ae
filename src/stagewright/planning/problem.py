"""What there is to decide: the cuts, devices and settings that the options leave open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

from stagewright.cluster import DeviceId, Devices, parse_placement
from stagewright.cost import Costs
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, ROUTES, Plan, Policy, Route
from stagewright.planning.estimate import Estimator
from stagewright.planning.exact import Candidate, Found, price
from stagewright.planning.fixed import given_cuts, table_of, whole_plan
from stagewright.planning.groups import FLUSHED, ClusterRates, Setting
from stagewright.planning.options import PlanOptions
from stagewright.policy import DISTINCT, RULES

_ANY_STALENESS = "any"


class Problem:
    """A profile on a cluster, and what the options leave open; parts that contradict one another are refused."""

    def __init__(self, costs: Costs, options: PlanOptions, devices: Devices = ()) -> None:
        self.costs, self.options, self.devices = costs, options, devices or costs.cluster.device_ids
        self.groups = None if options.placement is None else parse_placement(options.placement, costs.cluster)
        """The devices of each stage, where a placement gives them."""
        if self.groups is None and options.batch_per_device is not None:
            raise UsageError(
                "--batch-per-device needs to know the first stage's replicas, which the search is to find",
                "give --batch ROWS, or fix them with --placement",
            )
        self.batch = options.rows(len(self.groups[0]) if self.groups else 1)
        if options.num_microbatches is not None and options.num_microbatches > self.batch:
            raise PlanError(f"--microbatches is {options.num_microbatches}, but the batch has {self.batch} rows")
        self.table = table_of(costs.profile, self.batch)
        self.every_cut = bool(options.cut) or options.shares is not None
        """Whether a stage must begin at each of the cuts."""
        self.cuts = self._find_cuts()
        """Where stages may begin and end, from 0 to the number of layers."""
        self.shared, self._estimators = ClusterRates(costs), dict[Setting, Estimator]()

    def _find_cuts(self) -> tuple[int, ...]:
        layers, num_groups = self.costs.profile.layers, None if self.groups is None else len(self.groups)
        allowed = [number for number in range(1, len(layers)) if layers[number].cuttable]
        if not self.every_cut:
            if num_groups is not None and len(allowed) + 1 < num_groups:
                raise PlanError(f"{len(allowed) + 1} layers cannot be cut into the placement's {num_groups} stages")
            return (0, *allowed, len(layers))
        chosen = given_cuts(self.table, self.options, num_groups)
        for cut in chosen:
            if cut not in allowed:
                raise PlanError(
                    f"no stage may begin at {self.table.names[cut]}: it shares weights with an earlier layer",
                    "cut elsewhere, or give each its own weights",
                )
        return (0, *chosen, len(layers))

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
            batch=self.batch, num_microbatches=count, route=route, policy=policy or self.policies[0],
            hold=self.options.hold, recompute=self.options.recompute, staleness=staleness,
            shard_optimizer=self.options.shard_optimizer,
        )  # fmt: skip

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
                yield from _moved_cuts(here, self.cuts, together)
        if self.groups is None:
            yield from _moved_devices(here)
            yield from _swapped_devices(here, self.devices, self.shared.twins) if swaps else ()
        if self.is_free:
            yield from _joined(here)
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
        known = ((text, self.setting(1, "split", text)) for text in self.stalenesses)
        later = range(len(plan.stages) - 1, -1, -1)
        same = (text for text, each in known if tuple(map(each.versions, later)) == plan.versions)
        setting = self.setting(plan.num_microbatches, plan.route, next(same, FLUSHED), plan.policy)
        return Candidate(plan.edges, tuple(stage.devices for stage in plan.stages), setting)

    def plan(self, found: Found) -> Plan:
        """The whole plan of what a search found."""
        edges, groups, setting = found.candidate
        # Of versions that are listed stage by stage a plan of fewer stages keeps the last ones.
        versions = [setting.versions(later) or 1 for later in reversed(range(len(groups)))]
        buckets, cluster = self.options.num_buckets, self.costs.cluster
        return whole_plan(self.table, edges, groups, setting, versions, found.savings, buckets, cluster, self.costs)

    def price(self, candidate: Candidate, below: float = float("inf")) -> Found | None:
        """The estimate of a candidate; None where it does not fit, or is not below."""
        return price(candidate, self.estimator(candidate.setting), below)

    def estimator(self, setting: Setting) -> Estimator:
        """The estimator of a setting, made at the first call."""
        if setting not in self._estimators:
            self._estimators[setting] = Estimator(self.costs, setting, self.shared)
        return self._estimators[setting]


def _moved_cuts(here: Candidate, cuts: Sequence[int], together: int = 1) -> Iterator[Candidate]:
    """With one cut, or so many beside one another, a few places earlier or later."""
    place = {cut: number for number, cut in enumerate(cuts)}
    for number in range(1, len(here.edges) - together):
        some = [place.get(edge) for edge in here.edges[number : number + together]]
        for move in (-8, -3, -1, 1, 3, 8) if None not in some else ():
            moved = [at + move for at in some if at is not None]
            if moved[0] > 0 and moved[-1] < len(cuts) - 1:
                fresh = (cuts[at] for at in moved)
                edges = (*here.edges[:number], *fresh, *here.edges[number + together :])
                if all(low < high for low, high in pairwise(edges)):
                    yield here._replace(edges=edges)


def _moved_devices(here: Candidate) -> Iterator[Candidate]:
    """With some devices of one stage in the next, or the other way."""
    for number in range(len(here.groups) - 1):
        left, right = here.groups[number], here.groups[number + 1]
        pairs = []
        for few in (1, 2, 4, 8):
            if len(left) > few:
                pairs.append((left[:-few], (*left[-few:], *right)))
            if len(right) > few:
                pairs.append(((*left, *right[:few]), right[few:]))
        for pair in pairs:
            tidy = tuple(tuple(sorted(group)) for group in pair)
            yield here._replace(groups=(*here.groups[:number], *tidy, *here.groups[number + 2 :]))


def _swapped_devices(here: Candidate, devices: Devices, twins: Mapping[DeviceId, Devices]) -> Iterator[Candidate]:
    """With two devices that differ in one another's place, or one that does nothing in one's place, or beside it."""
    idle = tuple(sorted(set(devices) - {id for group in here.groups for id in group}))
    places = [*enumerate(here.groups), (-1, idle)]
    for (left, ours), (right, theirs) in combinations(places, 2):
        for one in {twins[id]: id for id in ours}.values():
            if right < 0 and len(ours) > 1:
                yield _regrouped(here, {left: {*ours} - {one}})
            for other in {twins[id]: id for id in theirs}.values():
                if twins[one] != twins[other]:
                    yield _regrouped(here, {left: {*ours, other} - {one}, right: {*theirs, one} - {other}})
        if right < 0:
            for other in {twins[id]: id for id in theirs}.values():
                yield _regrouped(here, {left: {*ours, other}})


def _regrouped(here: Candidate, groups: Mapping[int, set[DeviceId]]) -> Candidate:
    fresh = (tuple(sorted(groups.get(number, group))) for number, group in enumerate(here.groups))
    return here._replace(groups=tuple(fresh))


def _joined(here: Candidate) -> Iterator[Candidate]:
    """With two stages as one."""
    for number in range(len(here.groups) - 1):
        joined = tuple(sorted((*here.groups[number], *here.groups[number + 1])))
        groups = (*here.groups[:number], joined, *here.groups[number + 2 :])
        yield Candidate((*here.edges[: number + 1], *here.edges[number + 2 :]), groups, here.setting)
