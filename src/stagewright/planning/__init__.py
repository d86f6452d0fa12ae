"""Cuts, devices, microbatches and versions: the plan for a profile and a cluster."""

from stagewright.planning.fixed import fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import LayerTable, table_of

__all__ = ["LayerTable", "PlanOptions", "fixed_plan", "table_of"]
