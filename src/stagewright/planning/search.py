"""The best plan for a profile and a cluster, with its rivals and the reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.cluster import Cluster
from stagewright.cost import Costs
from stagewright.planning.choose import NEAR, Choice, Judge, Score, candidate_of, choose, compare, to_score
from stagewright.planning.exact import Leaders, search_exactly
from stagewright.planning.groups import Setting
from stagewright.planning.options import PlanOptions
from stagewright.planning.problem import Problem, make_problem
from stagewright.planning.quick import (
    Candidate,
    balanced,
    improve,
    pipedream_table,
    price,
    slide,
    stage_table,
    thin_cuts,
)
from stagewright.planning.reasons import explain, shape
from stagewright.planning.spaces import Given, Runs, Space, Subsets, device_orders, group_sizes
from stagewright.profile import Profile

_EXACT_DEVICES = 6
_EXACT_LAYERS = 12
"""Up to here every cut and every group of devices is looked at; beyond, plans are balanced and then improved."""
_EXACT_CUTS = 64
"""Up to here every cut is looked at where a placement gives the devices."""
_QUICK_CUTS = 40
_PIPEDREAM_CUTS = 256
_NUM_STARTS = 2
_MAX_STARTS = 5
"""How many plans of each number of stages, and of all numbers, are improved."""
_NUM_SLID = 3
_NUM_LEADERS = 12
_NUM_OTHERS = 3


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


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None) -> Search:
    """The fastest plan that fits: by the estimate, and among the best of those and around them by the score."""
    begin = perf_counter()
    problem = make_problem(Costs(profile, cluster), options)
    leaders, rivals = Leaders(most=_NUM_LEADERS), Leaders(most=1)
    _search_data_parallel(problem, rivals)
    search(problem, leaders, rivals)
    judge = Judge(problem, score)
    rival, why_not = compare(problem, rivals, judge if problem.is_free else Judge(problem, score))
    best, *choices = choose(problem, to_score(leaders), judge)
    reason = explain(
        best.plan, best.step_s, problem.costs, rival.plan if rival else None, rival.step_s if rival else 0.0
    )
    others = {shape(c.plan): c for c in reversed(choices) if rival is None or len(c.plan.stages) > 1}
    others.pop(shape(best.plan), None)
    return Search(
        best=replace(best, plan=replace(best.plan, notes=(reason,))),
        others=tuple(sorted(others.values(), key=lambda choice: choice.step_s)[:_NUM_OTHERS]),
        data_parallel=rival,
        why_no_data_parallel=why_not,
        reason=reason,
        num_plans=leaders.looked_at + rivals.looked_at,
        num_simulated=len(judge.known) if score is not None else 0,
        seconds=perf_counter() - begin,
    )


def _search_data_parallel(problem: Problem, rivals: Leaders) -> None:
    """Offers one stage on every device, with each number of microbatches; plain means exact training."""
    whole = (0, len(problem.costs.profile.layers))
    devices = problem.costs.cluster.device_ids
    for setting in problem.plain_settings():
        search_exactly(problem.estimator(setting), whole, Given((devices,)), rivals)


def search(problem: Problem, leaders: Leaders, rivals: Leaders) -> None:
    """Fills the leaders: on few devices and layers with the best of all, else with balanced plans, improved."""
    costs, devices = problem.costs, problem.costs.cluster.device_ids
    small = len(devices) <= _EXACT_DEVICES and len(problem.cuts) - 1 <= _EXACT_LAYERS
    spaces: list[Space] = [Subsets(costs, devices)]
    if problem.is_free:
        for entry in rivals.found:
            leaders.offer(*entry)
        _search_quickly(problem, leaders)
        if not small:
            return
    elif problem.groups is not None:
        spaces = [Given(problem.groups)]
    elif not small:
        spaces = [Runs(order, group_sizes(len(devices))) for order in device_orders(costs, devices)]
    cuts = problem.cuts if problem.every_cut else thin_cuts(costs, problem.cuts, _EXACT_CUTS)
    for setting in problem.settings(weighed=True):
        for space in spaces:
            search_exactly(problem.estimator(setting), cuts, space, leaders, every_cut=problem.every_cut)


def _search_quickly(problem: Problem, leaders: Leaders) -> None:
    """Balanced plans for a few settings; the best of them are improved."""
    costs, devices = problem.costs, problem.costs.cluster.device_ids
    cuts, sizes = thin_cuts(costs, problem.cuts, _QUICK_CUTS), group_sizes(len(devices))
    starts: dict[int, Leaders] = {}
    for setting in _few_settings(problem):
        for order in device_orders(costs, devices):
            for start in balanced(problem.estimator(setting), cuts, order, sizes, stage_table):
                _offer_start(start, problem, starts.setdefault(len(start.groups), Leaders(most=_NUM_STARTS)))
    for start in _pipedream_starts(problem):
        _offer_start(start, problem, starts.setdefault(len(start.groups), Leaders(most=_NUM_STARTS)))
    leaders.looked_at += sum(each.looked_at for each in starts.values())
    entries = sorted((entry for each in starts.values() for entry in each.found), key=lambda entry: entry[:2])
    for entry in entries:
        leaders.offer(*entry)
    for entry in entries[:_MAX_STARTS]:
        improve(candidate_of(entry), problem.estimator, problem.cuts, problem.settings(), leaders)
    for entry in leaders.found[:_NUM_SLID]:
        slide(candidate_of(entry), entry[2], problem.cuts, leaders)
    for entry in leaders.found[:_NUM_SLID]:
        # A cut and a number of microbatches may be better together, though neither is alone.
        here = candidate_of(entry)
        for setting in problem.settings():
            other, estimator = here._replace(setting=setting), problem.estimator(setting)
            is_other = setting != here.setting and setting.staleness == here.setting.staleness
            if is_other and price(other, estimator, NEAR * leaders.bound) is not None:
                slide(other, estimator, cuts, leaders)


def _pipedream_starts(problem: Problem) -> list[Candidate]:
    """The plans that PipeDream's prices favour, so that ours is never predicted slower than they are."""
    costs, devices = problem.costs, problem.costs.cluster.device_ids
    cuts, order = thin_cuts(costs, problem.cuts, _PIPEDREAM_CUTS), device_orders(costs, devices)[0]
    found = []
    for staleness in problem.stalenesses:
        estimator = problem.estimator(problem.setting(problem.counts[0], problem.routes[0], staleness))
        found += balanced(estimator, cuts, order, group_sizes(len(devices)), pipedream_table)
    return found


def _few_settings(problem: Problem) -> list[Setting]:
    counts = problem.counts
    few = sorted({counts[0], counts[len(counts) // 2]})
    return [problem.setting(count, problem.routes[0], wish) for wish in problem.stalenesses for count in few]


def _offer_start(start: Candidate, problem: Problem, starts: Leaders) -> None:
    for setting in problem.settings():
        if setting.staleness == start.setting.staleness:
            estimator = problem.estimator(setting)
            starts.looked_at += 1
            priced = price(start, estimator, starts.limit_s(start.shape))
            if priced is not None:
                starts.offer(*priced, estimator)
