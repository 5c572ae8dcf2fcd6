"""Progress of a job of several steps: one bar after another."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from kvtool.cli.options import Run
from kvtool.cli.progress import Bar, Reminder
from kvtool.cli.terminal import one_line
from kvtool.core.common.sizes import shown_size
from kvtool.core.common.types import Events
from kvtool.core.errors import KvtoolError


class JobView:
    """Shows what a job tells: a bar for each step from the moment its length is known, warnings, files by name."""

    def __init__(self, run: Run) -> None:
        self._out = run.out
        self._progress: Any = None
        self._bar: Any = None
        self._label, self._doing = "", ""  # of the step; and what is done in it, or beside it, now
        self._since = time.monotonic()  # when that began
        self._reminder: Reminder | None = None
        self.events = Events(
            step=self._step,
            expect=self._expect,
            advance=self._advance,
            status=self._status,
            say=self._say,
            warn=self._out.warning,
            failed=self._out.failed,
            skipped=lambda path, reason: self._out.detail(one_line(f"skipped {path}: {reason}")),
        )

    def __enter__(self) -> JobView:
        self._reminder = self._out.reminding(self._told)
        return self

    def __exit__(self, *error: Any) -> None:
        self._close(*error)
        if self._reminder is not None:
            self._reminder.close()

    def _told(self) -> str:
        """Return the progress of the job, or its present activity if that has no count."""
        if self._doing:
            return f"{self._doing}, for {timedelta(seconds=round(time.monotonic() - self._since))}"
        return self._bar.told() if self._bar else "working"

    def _step(self, label: str, total: int, unit: str) -> None:
        self._close()
        self._label, self._doing = label, ""
        self._progress = self._out.progress(label, total=total, unit=unit)
        self._bar = self._progress.__enter__()

    def _close(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*(error or (None, None, None)))
            self._progress = self._bar = None

    def _expect(self, total: float) -> None:
        if self._bar is not None:
            self._bar.expect(total)

    def _advance(self, count: float) -> None:
        if self._bar is not None:
            if self._doing:
                self._doing = ""
                self._show(self._label, pace=True)
            self._bar.advance(count)

    def _status(self, text: str) -> None:
        self._doing, self._since = text, time.monotonic()
        if self._out.mode == "jsonl":
            self._out.status(text)
        else:
            self._out.doing(text)
        self._show(text, pace=False)

    def _show(self, text: str, pace: bool) -> None:
        if isinstance(self._bar, Bar):
            self._bar.describe(text)
            self._bar.show_pace(pace)

    def _say(self, text: str, hint: str) -> None:
        self._out.status(text)
        if hint:
            self._out.status(hint)


def tell_budget(run: Run, max_size: int | None) -> None:
    """Report that `--max-size` replaces the store's own budget, if it has one."""
    from kvtool.core.cache.store import Store

    if max_size is None:
        return
    with suppress(KvtoolError), Store.open(run.folder) as store:  # else the command itself tells
        kept = store.budget()
        if kept is not None and kept != max_size:
            run.out.status(
                f"--max-size {shown_size(max_size)} takes the place of the store's own budget of {shown_size(kept)}"
            )
