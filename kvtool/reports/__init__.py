"""Reports of `kvtool inspect` on a store, one file each. A new one is its file and a line in `REPORTS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.reports.report import Report

# By name: `kvtool.reports.NAME` declares `REPORT`, and imports no torch at its top.
REPORTS = {
    "plan": "Cached part of a question's prompt, and the time that it saves.",
    "chunk": "One chunk of the store.",
    "audit": "Distance of answers from full prefill's (`query --audit`).",
    "codec": "Size and loss of each codec level.",
    "deviation": "Distance of reused keys and values from full prefill's.",
    "sparsity": "Attention by class of key, and how few keys take most of it.",
    "gate": "The laws that the gate has checked on this model.",
}
OTHER_NAMES = {"quality": "eval"}  # reports that are commands of their own, as `kvtool inspect` has them, too


def load_report(name: str) -> Report:
    report: Report = importlib.import_module(f"kvtool.reports.{OTHER_NAMES.get(name, name)}").REPORT
    return report
