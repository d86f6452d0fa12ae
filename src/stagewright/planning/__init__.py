"""Cuts, devices, microbatches and versions: the plan for a profile and a cluster."""

from stagewright.planning.fixed import LayerTable, fixed_plan, table_of
from stagewright.planning.options import PlanOptions

__all__ = ["LayerTable", "PlanOptions", "fixed_plan", "table_of"]
