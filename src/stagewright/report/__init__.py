"""What a person reads: one page, Markdown tables, timelines, traces.

records ─▶ cases ─┬─▶ tables ────┬─▶ page, Markdown
                  └─▶ timeline ──┴─▶ picture, trace
"""

from stagewright.report.cases import Failure
from stagewright.report.page import ReportPaths, live_page, make_report
from stagewright.report.timeline import chrome_trace, timeline_svg

__all__ = ["Failure", "ReportPaths", "chrome_trace", "live_page", "make_report", "timeline_svg"]
