"""Reports of `kvtool inspect` on a store. A new one is `NAME = Report(…)` in its file, and a line in `REPORTS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.reports.report import Report

# By name. Their modules import no torch at the top.
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
_MODULES = {
    **dict.fromkeys(("glance", "chunk", "gate", "audit"), "stored"),
    **dict.fromkeys(("deviation", "sparsity"), "reuse"),
}


def load_report(name: str) -> Report:
    name = OTHER_NAMES.get(name, name)
    report: Report = getattr(importlib.import_module(f"kvtool.reports.{_MODULES.get(name, name)}"), name.upper())
    return report
