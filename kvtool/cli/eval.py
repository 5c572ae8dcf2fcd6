"""`kvtool eval`: the report on one's own questions (`kvtool/reports/eval.py`) as a command of its own."""

from __future__ import annotations

from kvtool.cli.inspect import report_app
from kvtool.reports.eval import REPORT

app = report_app(REPORT)
