"""`kvtool doctor`: whether everything that a question needs is there and works."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.text import counted
from kvtool.core.errors import EXIT_FAILED
from kvtool.core.model.options import ModelOptions
from kvtool.core.remote.options import RemoteOptions

if TYPE_CHECKING:
    from kvtool.reports.doctor import Finding

_LABELS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


@takes(
    StoreOptions,
    RemoteOptions,
    ModelOptions,
    examples=("doctor", "doctor -v", "doctor --model smollm2 --store ./kv --json"),
)
def doctor(run: Run) -> int | None:
    """Check that libraries, device, model, store and disk work. Exit 1 if one does not."""
    from kvtool.reports.doctor import checkup

    timeout = run.get(RemoteOptions).remote_timeout
    found = checkup(run.get(StoreOptions).place, run.get(ModelOptions), timeout, run.out.doing)
    healthy = all(finding.state != "failed" for finding in found)
    run.out.result({"healthy": healthy, "findings": [asdict(finding) for finding in found]}, lambda: _show(run, found))
    return None if healthy else EXIT_FAILED


def _show(run: Run, found: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in found)
    for finding in found:
        run.out.print(f"{_LABELS[finding.state]:7}  {finding.subject:{width}}  {finding.message}")
        if finding.hint:
            run.out.print(f"{'':{width + 11}}{finding.hint}")
        for line in finding.details if run.out.verbosity > 0 else ():
            run.out.print(f"{'':{width + 11}}{line}")
    counts = {state: sum(finding.state == state for finding in found) for state in ("failed", "warning")}
    if any(counts.values()):
        run.out.status(f"{counts['failed']} failed, {counted(counts['warning'], 'warning')}")
    else:
        run.out.status("all is well")
