"""The best plan for a profile and a cluster, with its rivals and the reasons.

explore   the shapes that the estimate favours
pool      every leading shape in every setting, the best by the estimate first: simulated while one could still lead
climb     the fastest with one thing changed (a cut, a device, microbatches, route, order) while that helps
finish    the same in more buckets, and with one batch under way at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from time import perf_counter

from stagewright.cluster import Cluster, Devices, format_devices
from stagewright.cost import Costs
from stagewright.errors import PlanError, ScheduleError
from stagewright.memory import in_words
from stagewright.plan import DEFAULT_POLICY, Plan
from stagewright.planning.estimate import Shortage, estimate, with_prediction
from stagewright.planning.exact import Found
from stagewright.planning.explore import explore, least_full
from stagewright.planning.fixed import normal_form
from stagewright.planning.options import PlanOptions
from stagewright.planning.problem import Problem
from stagewright.profile import Profile
from stagewright.record import Record
from stagewright.system import OWN, System

Score = Callable[[Plan], Record]
"""What a plan does when it is simulated; the planner is handed it."""

_TIE = 1e-3
"""Steps that differ by less than this share are equal, and the plainest plan is taken."""
_NEAR = 1.12
"""A plan is simulated if its estimate is no more than so many times what the fastest so far takes."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan and what it should do."""

    plan: Plan
    step_s: float
    peak_bytes: tuple[int, ...]
    """For each stage, on its fullest device."""
    limit: str
    record: Record | None = None
    cost: float | None = None
    """What a million samples cost on the devices that it uses, where their prices are known."""

    @property
    def images_per_s(self) -> float:
        """Rows of a batch over the step."""
        return self.plan.batch / self.step_s


@dataclass(frozen=True, kw_only=True)
class Search:
    """The best plan, the runners-up, and plain data parallelism to compare with."""

    best: Choice
    others: tuple[Choice, ...]
    data_parallel: Choice | None
    why_no_data_parallel: str
    reason: str
    num_plans: int
    """How many the estimate has weighed."""
    num_simulated: int
    seconds: float


def make_plan(
    profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None, system: System = OWN,
    ways: Mapping[str, Profile] | None = None, devices: Devices = (),
) -> Search:  # fmt: skip
    """The fastest plan that fits, by the estimate, then by the score; `ways` are profiles by options that take less."""
    begin = perf_counter()
    problem = Problem(Costs(profile, cluster, system), options, devices)
    leaders, rivals = explore(problem)
    judge = _Judge(problem, score)
    plain = [problem.plan(found) for found in rivals.found]
    rival = (judge if problem.is_free else _Judge(problem, score))(plain[0]) if plain else None
    best, *choices = _choose(problem, leaders.to_score, judge, ways or {})
    reason = _explain(best.plan, best.step_s, problem.costs, rival)
    others = {shape(c.plan): c for c in reversed(choices) if rival is None or len(c.plan.stages) > 1}
    others.pop(shape(best.plan), None)
    short = [] if rival else least_full(problem, [problem.devices]).stages
    return Search(
        best=replace(best, plan=with_prediction(replace(best.plan, notes=(reason,)), problem.costs, best.step_s)),
        others=tuple(sorted(others.values(), key=lambda choice: choice.step_s)[:3]), data_parallel=rival,
        why_no_data_parallel=f"does not fit: {_describe(short[0], problem.costs)}" if short else "", reason=reason,
        num_plans=leaders.looked_at + rivals.looked_at,
        num_simulated=len(judge.known) if score is not None else 0, seconds=perf_counter() - begin,
    )  # fmt: skip


class _Judge:
    """Plans as choices, each looked at once: by the score where there is one, else by the estimate."""

    def __init__(self, problem: Problem, score: Score | None) -> None:
        self.problem, self.score = problem, score
        self.known: dict[Plan, Choice | None] = {}
        self.work = 0

    @property
    def choices(self) -> list[Choice]:
        return sorted(filter(None, self.known.values()), key=lambda each: (each.step_s, _plainness(each.plan)))

    def __call__(self, plan: Plan) -> Choice | None:
        """The plan's step, peaks and limit; None where it does not fit or cannot be simulated."""
        if plan not in self.known:
            # About so many microbatches of replicas a simulation runs: more batches where there is no flush.
            batches = 4 if plan.is_synchronous else 8 + 6 * max(plan.versions)
            self.work += plan.num_microbatches * sum(plan.replicas) * batches if self.score else 0
            if self.work > 300_000 and self.choices:
                return None  # about five seconds of simulations were enough
            prices = [self.problem.costs.cluster.device(id).price_per_h for id in plan.devices]
            self.known[plan] = found = self._judged(plan)
            if found is not None and None not in prices:
                cost = sum(filter(None, prices)) / 3600 * 1e6 / found.images_per_s
                self.known[plan] = replace(found, cost=cost)
        return self.known[plan]

    def _judged(self, plan: Plan) -> Choice | None:
        found = estimate(plan, self.problem.costs, self.problem.shared)
        if found.shortage is not None:
            return None
        peaks = tuple(part.peak_bytes for part in found.parts)
        if self.score is None:
            return Choice(plan=plan, step_s=found.step_s, peak_bytes=peaks, limit=found.limit)
        try:
            record = self.score(plan)
        except ScheduleError:
            return None
        held = {use.device: use.peak_bytes for use in record.devices}
        if any(held.get(str(id), 0) > self.problem.costs.cluster.device(id).memory_bytes for id in plan.devices):
            return None
        peaks = tuple(max(held.get(str(id), 0) for id in stage.devices) for stage in plan.stages) if held else peaks
        # where both blame a reduction, the estimate's words name the layer
        same = record.limit.startswith("all-reduce") and found.limit.startswith("all-reduce")
        limit = found.limit if same or not record.limit else record.limit
        return Choice(plan=plan, step_s=record.median_step_s, peak_bytes=peaks, limit=limit, record=record)


def _plainness(plan: Plan) -> tuple[object, ...]:
    """What a person would rather have of two equally fast plans, the smallest first."""
    buckets = sum(stage.num_buckets for stage in plan.stages)
    is_other = plan.policy != DEFAULT_POLICY
    return len(plan.stages), max(plan.versions), is_other, plan.hold is not None, plan.num_microbatches, buckets


def _choose(problem: Problem, leaders: Iterable[Found], judge: _Judge, ways: Mapping[str, Profile]) -> list[Choice]:
    """The plan to take, then others, the fastest first; whoever exceeds memory is left out."""
    pool = _ranked(problem, leaders)
    fitting: set[object] = set()
    for found in pool:
        if found.candidate.shape not in fitting and judge(problem.plan(found)) is not None:
            fitting.add(found.candidate.shape)
    if not judge.choices:
        raise _refused(problem, ways)
    if judge.score is not None:
        could_lead = (found for found in pool if found.step_s <= _NEAR * judge.choices[0].step_s)
        for found in islice(could_lead, 32):
            judge(problem.plan(found))
        for choice in _of_each_shape(judge.choices)[:3]:
            _finish(_climb(choice, problem, judge), problem, judge)
    best = _plainest(judge.choices, _TIE if judge.score is not None else 0.0)
    return [best, *(choice for choice in judge.choices if choice is not best)]


def _ranked(problem: Problem, leaders: Iterable[Found]) -> list[Found]:
    """Every leading shape in every setting that the estimate tells apart, the best first; none that is far behind."""
    pool: list[Found] = []
    settings, far_s = problem.settings(weighed=True), float("inf")
    for candidate in dict.fromkeys(entry.candidate._replace(setting=settings[0]) for entry in leaders):
        below_s = float("inf")
        for setting in settings:
            found = problem.price(candidate._replace(setting=setting), below_s)
            if found is not None:
                pool.append(found)
                far_s = min(far_s, 1.25 * found.step_s)
                below_s = max(far_s, min(below_s, found.step_s))
    return sorted(pool, key=lambda found: found.rank)


def _of_each_shape(choices: Sequence[Choice]) -> list[Choice]:
    """The fastest choice of each shape, of those that come first."""
    found: dict[object, Choice] = {}
    for choice in choices:
        found.setdefault(tuple((stage.layers[0], stage.devices) for stage in choice.plan.stages), choice)
    return list(found.values())


def _climb(choice: Choice, problem: Problem, judge: _Judge) -> Choice:
    """Changes one thing after the other for as long as the score finds a faster plan."""
    while (better := next(_faster(choice, problem, judge), None)) is not None:
        choice = better
    return choice


def _faster(choice: Choice, problem: Problem, judge: _Judge) -> Iterator[Choice]:
    """Plans beside one that are faster, those with the best estimate first."""
    here = problem.candidate(choice.plan)
    around = problem.around(here, problem.near(here.setting), most_cuts=2)
    near = (problem.price(each, _NEAR * choice.step_s) for each in around)
    plans = map(problem.plan, sorted(filter(None, near), key=lambda found: found.rank))
    for plan in islice((plan for plan in plans if plan not in judge.known), 24):
        other = judge(plan)
        if other is not None and other.step_s < choice.step_s * (1 - _TIE):
            yield other


def _finish(choice: Choice, problem: Problem, judge: _Judge) -> None:
    """Tries gradients in more pieces, of which the first leaves sooner, and without a flush one batch at a time."""
    plan, better = choice.plan, problem.options.num_buckets is None and max(choice.plan.replicas) > 1
    for times in (2, 4, 8):
        if better:
            counts = (max(one.num_buckets, min(one.num_buckets * times, len(one.layers))) for one in plan.stages)
            stages = tuple(replace(one, num_buckets=count) for one, count in zip(plan.stages, counts))
            found = judge(normal_form(replace(plan, stages=stages)))
            better = found is not None and found.step_s < choice.step_s
            choice = found if found is not None and better else choice
    if plan.hold is None and not plan.is_synchronous:
        judge(replace(plan, hold=1))


def _plainest(choices: Sequence[Choice], tie: float) -> Choice:
    """Of the plans that are as fast as the fastest the plainest: fewer stages, so fewer versions of weights as well."""
    near_s = min(choice.step_s for choice in choices) * (1 + tie)
    near = [choice for choice in choices if choice.step_s <= near_s]
    return min(near, key=lambda choice: (_plainness(choice.plan), choice.step_s))


def _describe(use: Shortage, costs: Costs) -> str:
    """`layers fc1 … loss need 2.3 GiB on 0:7, which has 1.0 GiB`."""
    names = costs.profile.names[use.first : use.last]
    layers = f"layer {names[0]} needs" if len(names) == 1 else f"layers {names[0]} … {names[-1]} need"
    return f"{layers} {_bytes_text(use.need_bytes)} on {use.device}, which has {_bytes_text(use.has_bytes)}"


def _refused(problem: Problem, ways: Mapping[str, Profile]) -> PlanError:
    """The error for a model that fits in no way: what each stage of the least full plan needs, and what would help."""
    found, costs = least_full(problem), problem.costs
    name, batch, where = costs.profile.model, problem.batch, costs.cluster.name
    told = f"no plan of {name} for {batch} rows fits on {where}"
    if not found.stages:
        return PlanError(told, "use a smaller --batch, more --microbatches, or more or larger devices")
    worst = max(found.stages, key=lambda use: use.ratio)
    lines = [
        f"{_describe(use, costs)}{', though it recomputes' if use.how['recompute'] else ''} "
        f"({in_words(costs.stage_bytes(use.first, use.last, **use.how)._asdict())})"
        for use in found.stages
    ]
    told += f"; where the fullest device is least full, {_describe(worst, costs)}"
    return PlanError(told, "\n".join([*lines, *_helping(problem, ways), "or use more or larger devices"]))


def _helping(problem: Problem, ways: Mapping[str, Profile]) -> Iterator[str]:
    """`--recompute brings the fullest device, 0:1, to 10.9 GiB of 11.8 GiB`: how far each option would come."""
    options, costs, cluster = problem.options, problem.costs, problem.costs.cluster
    others = {option: Problem(Costs(profile, cluster, costs.system), options) for option, profile in ways.items()}
    if options.shard_optimizer is False and any(len(group) > 1 for group in problem.groups or ()):
        others["--shard-optimizer"] = Problem(costs, replace(options, shard_optimizer=True))
    if options.recompute is False:
        others["--recompute"] = Problem(costs, replace(options, recompute=True))
    if options.num_microbatches is not None:
        others["without --microbatches, more of them"] = Problem(costs, replace(options, num_microbatches=None))
    if problem.batch > 1:
        less = replace(options, batch=max(problem.batch // 4, 1), batch_per_device=None, num_microbatches=None)
        others[f"--batch {less.batch}"] = Problem(costs, less)
    for option, other in others.items():
        found = least_full(other)
        if found.stages:
            worst = max(found.stages, key=lambda use: use.ratio)
            verb = "brings" if found.ratio <= 1 else "does not suffice: it brings"
            about = "about " if option in ways else ""
            sizes = f"{about}{_bytes_text(worst.need_bytes)} of {_bytes_text(worst.has_bytes)}"
            yield f"{option} {verb} the fullest device, {worst.device}, to {sizes}"


def _bytes_text(num_bytes: float) -> str:
    """`494 MiB`, `6.9 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            value = num_bytes / 2**power
            return f"{value:,.1f} {unit}" if value < 100 and unit == "GiB" else f"{value:,.0f} {unit}"
    return f"{num_bytes:,.0f} B"


def shape(plan: Plan) -> str:
    """`7-1 cut at fc1`, or `data parallel` where there is one stage."""
    if len(plan.stages) == 1:
        many = len(plan.stages[0].devices)
        return "data parallel" if many > 1 else "one device"
    cuts = ", ".join(stage.layers[0] for stage in plan.stages[1:])
    return f"{'-'.join(map(str, plan.replicas))} cut at {cuts}"


def _explain(plan: Plan, step_s: float, costs: Costs, rival: Choice | None) -> str:
    if rival is None:
        return f"{shape(plan)} fits; data parallelism does not."
    if len(plan.stages) == 1:
        return f"{shape(plan)} is fastest: no cut gains more than its transfers and waiting cost."
    gain = f"{rival.step_s / step_s:.2f} × as fast as data parallelism"
    weights = [costs.gradient_bytes(first, last) for first, last in pairwise(plan.edges)]
    alone = [(size, stage) for size, stage in zip(weights, plan.stages) if len(stage.devices) == 1]
    if sum(size for size, _ in alone) > sum(weights) / 4:
        kept, stage = max(alone, key=lambda entry: entry[0])
        layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} to {stage.layers[-1]}"
        reduced = sum(weights) - sum(size for size, _ in alone)
        rest = f"only {_bytes_text(reduced)} are reduced" if reduced else "nothing is reduced"
        return (
            f"{shape(plan)} keeps the {_bytes_text(kept)} of weights from {layers} on "
            f"{format_devices(stage.devices)} alone, so {rest} instead of {_bytes_text(sum(weights))}: {gain}."
        )
    return f"{shape(plan)} reduces each stage's gradients among fewer devices, and hides its transfers: {gain}."
