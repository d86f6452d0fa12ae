"""Plans judged by the simulator: what `make_plan` does unless it is given another judge."""

from __future__ import annotations

from stagewright.cluster import Cluster
from stagewright.cost import Costs
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.planning.choose import Score
from stagewright.planning.search import Search
from stagewright.planning.search import make_plan as search
from stagewright.profile import Profile
from stagewright.record import Record
from stagewright.scheduling import make_schedule
from stagewright.simulation.run import simulate


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None) -> Search:
    """The fastest plan that fits, by the simulator or another score."""
    return search(profile, cluster, options, score or simulator(profile, cluster))


def simulator(profile: Profile, cluster: Cluster) -> Score:
    """The simulation of any plan on this profile and cluster."""
    costs = Costs(profile, cluster)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False, costs=costs)

    return score
