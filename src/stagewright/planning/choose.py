"""From candidates to a choice: plans are made whole, scored, and checked against memory once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stagewright.cost import num_buckets
from stagewright.errors import PlanError, StagewrightError
from stagewright.plan import Plan, Policy, Stage
from stagewright.planning.estimate import Estimator, Shortage, estimate
from stagewright.planning.exact import Found, Leaders, Placed
from stagewright.planning.fixed import row_weights
from stagewright.planning.normal import normal_form
from stagewright.planning.problem import Problem
from stagewright.planning.reasons import bytes_text
from stagewright.record import Record

Score = Callable[[Plan], Record]
"""What a plan does when it is simulated; the planner is handed it."""

MORE_BUCKETS_GAIN = 0.01
"""How much faster a plan must be with its gradients in more pieces, for each piece costs something everywhere."""
MORE_STAGES_GAIN = 0.03
"""How much faster a plan with more stages must be: each waits for others, and holds weights of its own."""
REFINED_GAIN = 0.15
"""How much a plan may gain by other microbatches and another order: a GPT's 1-1 gained 0.11."""
OTHER_POLICIES: tuple[Policy, ...] = ("zero-bubble", "gpipe")
OTHER_ORDER_GAIN = 0.03
"""How much faster than in 1f1b a plan must be in another order, which holds more, or folds nothing."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan and what it should do."""

    plan: Plan
    step_s: float
    peak_bytes: tuple[int, ...]
    """For each stage, on its fullest device."""
    limit: str
    record: Record | None = None

    @property
    def images_per_s(self) -> float:
        """Rows of a batch over the step."""
        return self.plan.batch / self.step_s


def whole_plan(problem: Problem, stages: Sequence[Placed], estimator: Estimator) -> Plan:
    """The plan of stages that a search placed."""
    costs, setting = problem.costs, estimator.setting
    made = []
    for number, placed in enumerate(stages):
        parameters = costs.parameter_bytes(placed.first, placed.last)
        made.append(
            Stage(
                layers=costs.profile.names[placed.first : placed.last],
                devices=placed.devices,
                versions=setting.versions(len(stages) - 1 - number) or 1,
                recompute=placed.recompute,
                num_buckets=problem.options.num_buckets or num_buckets(parameters),
                row_weights=row_weights(placed.devices, costs.cluster),
            )
        )
    plan = Plan(
        model=costs.profile.model,
        stages=tuple(made),
        batch=setting.batch,
        num_microbatches=setting.num_microbatches,
        route=setting.route,
        policy=setting.policy,
        hold=setting.hold,
    )
    return normal_form(plan)


def choose(
    problem: Problem, leaders: Leaders, score: Score | None, rival: Choice | None, known: Sequence[Plan] = ()
) -> list[Choice]:
    """The leaders as choices: the one to take, then others, the fastest first; whoever exceeds memory is left out.

    Plans that are known for fast in another way are judged with them.
    """
    choices: list[Choice] = [] if rival is None else [rival]
    for _, stages, estimator in to_score(leaders) if score is not None else leaders.found:
        plan = whole_plan(problem, stages, estimator)
        if rival is None or plan != rival.plan:
            found = judged(plan, problem, score)
            if found is not None and score is not None:
                found = better(found, _in_more_buckets(plan, problem, (4,)), problem, score, gain=MORE_BUCKETS_GAIN)
            choices += [found] if found is not None else []
    found_plans = [choice.plan for choice in choices]
    for plan in known:
        found = None if plan in found_plans else judged(plan, problem, score)
        choices += [found] if found is not None else []
    if not choices:
        raise refused(problem)
    choices.sort(key=in_order)
    if score is None:
        return choices
    worth = {id(choice) for choice in worth_refining(choices)}
    choices = [refined(choice, problem, score) if id(choice) in worth else choice for choice in choices]
    best = simplest_of(choices)
    return [best, *sorted((choice for choice in choices if choice is not best), key=in_order)]


def without_flush(problem: Problem, plans: Sequence[Plan]) -> list[Plan]:
    """Exact plans with the versions that a problem asks for: what is fast with a flush is so without one."""
    found = []
    for staleness in problem.stalenesses:
        setting = problem.setting(1, problem.routes[0], staleness)
        for plan in plans:
            versions = [setting.versions(later) for later in reversed(range(len(plan.stages)))]
            if None not in versions:
                stages = (replace(stage, versions=count or 1) for stage, count in zip(plan.stages, versions))
                found.append(normal_form(replace(plan, stages=tuple(stages), policy=setting.policy)))
    return found


def in_order(choice: Choice) -> tuple[float, int]:
    """The fastest first, and of equal ones that with fewer stages."""
    return choice.step_s, len(choice.plan.stages)


def worth_refining(choices: Sequence[Choice]) -> list[Choice]:
    """Of each number of stages the fastest, where it is not far from the fastest of all, which come first."""
    fastest: dict[int, Choice] = {}
    for choice in choices:
        fastest.setdefault(len(choice.plan.stages), choice)
    return [choice for choice in fastest.values() if choice.step_s < choices[0].step_s * (1 + REFINED_GAIN)]


def to_score(leaders: Leaders) -> list[Found]:
    """The leaders that are worth a simulation: the best of all, and of few stages the best of some sizes of groups.

    The estimate may hold a dozen cuts of one deep pipeline for a little faster than all that has two stages, and of two
    stages three cuts of 2-1 for a little faster than 3-1, where a simulation knows better.
    """
    shallow = (entry for _, found in sorted(leaders.shallow.items()) for entry in found)
    return [*leaders.found, *(entry for entry in shallow if entry not in leaders.found)]


def simplest_of(choices: Sequence[Choice]) -> Choice:
    """Of the plans next to the fastest that with the fewest stages, so the fewest versions of weights as well."""
    near_s = min(choice.step_s for choice in choices) * (1 + MORE_STAGES_GAIN)
    return min(
        (each for each in choices if each.step_s <= near_s), key=lambda each: (len(each.plan.stages), each.step_s)
    )


def judged(plan: Plan, problem: Problem, score: Score | None) -> Choice | None:
    """The plan's step, peaks and limit: by the score where there is one; None where it does not fit."""
    found = estimate(plan, problem.costs, problem.shared)
    if found.shortage is not None:
        return None
    peaks = tuple(part.peak_bytes for part in found.parts)
    if score is None:
        return Choice(plan=plan, step_s=found.step_s, peak_bytes=peaks, limit=found.limit)
    record = score(plan)
    held = {use.device: use.peak_bytes for use in record.devices}
    if any(held.get(str(id), 0) > problem.costs.cluster.device(id).memory_bytes for id in plan.devices):
        return None
    peaks = tuple(max(held.get(str(id), 0) for id in stage.devices) for stage in plan.stages) if held else peaks
    # where both blame a reduction, the estimate's words name the layer
    same = record.limit.startswith("all-reduce") and found.limit.startswith("all-reduce")
    limit = found.limit if same or not record.limit else record.limit
    return Choice(plan=plan, step_s=record.median_step_s, peak_bytes=peaks, limit=limit, record=record)


def refined(best: Choice, problem: Problem, score: Score) -> Choice:
    """A plan with the microbatches, route, order and buckets that a score finds best, where these are open."""
    if len(best.plan.stages) > 1:
        best = better(best, _variants(best.plan, problem), problem, score, gain=1e-3)
        best = better(best, _orders(best.plan, problem), problem, score, gain=OTHER_ORDER_GAIN)
    return better(best, _in_more_buckets(best.plan, problem), problem, score, gain=MORE_BUCKETS_GAIN)


def better(best: Choice, plans: Iterator[Plan], problem: Problem, score: Score, *, gain: float) -> Choice:
    """The best of a choice and other plans, each of which must be faster by the gain."""
    for plan in plans:
        try:
            other = judged(plan, problem, score)
        except StagewrightError:
            continue  # an order that this plan cannot have
        if other is not None and other.step_s < best.step_s * (1 - gain):
            best = other
    return best


def _in_more_buckets(plan: Plan, problem: Problem, factors: Sequence[int] = (2, 4, 8)) -> Iterator[Plan]:
    """The plan with the gradients of replicated stages in more pieces: the first is on its way sooner."""
    if problem.options.num_buckets is not None or max(plan.replicas) < 2:
        return
    for times in factors:
        stages = (
            replace(stage, num_buckets=max(stage.num_buckets, min(stage.num_buckets * times, len(stage.layers))))
            for stage in plan.stages
        )
        yield normal_form(replace(plan, stages=tuple(stages)))


def _variants(plan: Plan, problem: Problem) -> Iterator[Plan]:
    for count in (plan.num_microbatches // 2, plan.num_microbatches * 2):
        if count in problem.counts:
            yield replace(plan, num_microbatches=count)
    if plan.num_microbatches > 1:
        for route in problem.routes:
            if route != plan.route:
                other = normal_form(replace(plan, route=route))
                yield from () if other == plan else (other,)


def _orders(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """The plan in other orders, where the order is open."""
    if plan.num_microbatches > 1 and problem.options.policy is None:
        for policy in OTHER_POLICIES:
            yield replace(plan, policy=policy)


def compare(problem: Problem, rivals: Leaders, score: Score | None) -> tuple[Choice | None, str]:
    """Plain data parallelism as a choice, or why it cannot be."""
    for _, stages, estimator in rivals.found:
        found = judged(whole_plan(problem, stages, estimator), problem, score)
        if found is not None:
            return found, ""
    devices = problem.costs.cluster.device_ids
    short = problem.data_parallel_shortage(devices)
    return None, "" if short is None else f"does not fit: {describe(short, problem)}"


def describe(short: Shortage, problem: Problem) -> str:
    """`layers fc1 … loss need 2.3 GiB on 0:7, which has 1.0 GiB`."""
    names = problem.costs.profile.names[short.first : short.last]
    layers = f"layer {names[0]} needs" if len(names) == 1 else f"layers {names[0]} … {names[-1]} need"
    need, has = bytes_text(short.need_bytes), bytes_text(short.has_bytes)
    return f"{layers} {need} on {short.device}, which has {has}"


def refused(problem: Problem) -> PlanError:
    """The error for a model that fits in no way, with the stage that came closest."""
    short = problem.shortage
    why = "" if short is None else f"; closest: {describe(short, problem)}"
    return PlanError(
        f"no plan of {problem.costs.profile.model} for {problem.batch} rows fits on {problem.costs.cluster.name}{why}",
        "use a smaller --batch, more --microbatches, --recompute, or more or larger devices",
    )
