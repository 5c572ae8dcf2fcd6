"""Reports of `kvtool inspect` on a store, one file each. A new one is its file and a line in `REPORTS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.reports.report import Report

# By name: `kvtool.reports.NAME` declares `REPORT`, and imports no torch at its top.
REPORTS = {
    "plan": "What of a question's prompt is cached, and what that is worth.",
    "chunk": "One chunk of the store.",
    "quality": "Fusion modes beside full recompute, over a file of questions.",
    "audit": "How far answers were from full prefill's (`query --audit`).",
    "codec": "What each codec level costs and loses.",
    "deviation": "How far reused keys and values are from full prefill's.",
    "sparsity": "Where attention goes, and how few keys take most of it.",
    "gate": "The laws that the gate has checked on this model.",
}


def load_report(name: str) -> Report:
    """Import the report of this name; `glance` is what is shown where none is named."""
    report: Report = importlib.import_module(f"kvtool.reports.{name}").REPORT
    return report
