"""Reports of `kvtool inspect` on a store, one file each. A new one is its file and a line in `REPORTS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.lab.reports.report import Report

# By name: `kvtool.lab.reports.NAME` declares `REPORT`, and imports no torch at its top.
REPORTS = {
    "plan": "Show the cached parts of a prompt, and the expected times.",
    "chunk": "Show one chunk of the store.",
    "quality": "Compare fusion modes with full recompute on your questions.",
    "audit": "Show the distance of audited answers from full prefill.",
    "codec": "Measure the size and loss of each compression level.",
    "deviation": "Compare reused keys and values with full prefill.",
    "sparsity": "Show which keys get attention, and how few get most of it.",
    "gate": "Show the results of this model's self-check.",
}


def load_report(name: str) -> Report:
    """Import the report of this name; `glance` is what is shown where none is named."""
    report: Report = importlib.import_module(f"kvtool.lab.reports.{name}").REPORT
    return report
