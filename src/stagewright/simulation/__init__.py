"""Schedule × profile × cluster → record: an event simulation, and what follows from it."""

from stagewright.simulation.run import make_plan, simulate, simulator
from stagewright.simulation.whatif import faster_links, fastest_schedule

__all__ = ["faster_links", "fastest_schedule", "make_plan", "simulate", "simulator"]
