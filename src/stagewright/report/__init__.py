"""What a person reads: one page, Markdown tables, timelines, traces.

records ─▶ cases ─┬─▶ tables ──┬─▶ Markdown
                  ├─▶ charts ──┼─▶ page
                  └─▶ timeline ┴─▶ pictures, terminal, trace
"""

from stagewright.report.cases import Failure
from stagewright.report.make import ReportPaths, make_report
from stagewright.report.pictures import timeline_svg, timeline_text
from stagewright.report.terminal import comparison_table
from stagewright.report.trace import chrome_trace

__all__ = [
    "Failure",
    "ReportPaths",
    "chrome_trace",
    "comparison_table",
    "make_report",
    "timeline_svg",
    "timeline_text",
]
