"""Schedule × profile × cluster → record: an event simulation, and what follows from it."""

from stagewright.simulation.judge import make_plan, simulator
from stagewright.simulation.run import simulate
from stagewright.simulation.whatif import faster_links, fastest_schedule

__all__ = ["faster_links", "fastest_schedule", "make_plan", "simulate", "simulator"]
