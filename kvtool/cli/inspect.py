"""`kvtool inspect`: the store at a glance, and a command for each report in `kvtool/reports`; `kvtool eval` is one."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
import typer.core

from kvtool.cli.commands import LazyGroup, build_command, new_app
from kvtool.cli.options import ManyValues, Question, Run, is_flag, open_any_store, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.errors import KvtoolError
from kvtool.core.remote.options import RemoteOptions
from kvtool.reports import OTHER_NAMES, REPORTS, load_report
from kvtool.reports.report import PageOptions, Quote, Report, ReportContext, ReportResult, Shown, page

_EVERY = (PageOptions, StoreOptions, RemoteOptions)  # what every report takes


class Reports(LazyGroup):
    lines: ClassVar[Mapping[str, str]] = REPORTS

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in OTHER_NAMES:
            self.add_command(typer.core.TyperCommand(name, hidden=True, rich_markup_mode=None))

    def load(self, name: str) -> Any:
        return build_command(report_command(load_report(name)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._name_first(args))

    def _name_first(self, args: list[str]) -> list[str]:
        options = {flag: option for option in self.params for flag in (*option.opts, *option.secondary_opts)}
        at = 0
        while at < len(args) and args[at] in options:
            at += 1 if is_flag(options[args[at]]) else 2
        return [args[at], *args[:at], *args[at + 1 :]] if at < len(args) and args[at] in self.commands else args


inspect_app = new_app(
    help="Show the store at a glance, or make one report about it; `kvtool inspect REPORT --help` describes one."
)


@inspect_app.callback(cls=Reports, invoke_without_command=True)
@takes(*_EVERY)
def inspect(run: Run, ctx: typer.Context) -> int | None:
    """Show the store at a glance if no report is named."""
    if ctx.invoked_subcommand is None:
        return show(run, load_report("glance"))
    return None


def report_command(report: Report) -> Callable[..., int | None]:
    def command(run: Run, about: str | None = None) -> int | None:
        return show(run, report, about)

    parameters = [signatures.Parameter("run", signatures.Parameter.KEYWORD_ONLY, annotation=Run)]
    if report.about:
        argument = typer.Argument(metavar=report.about, help=report.about_help, show_default=False)
        parameters.append(
            signatures.Parameter(
                "about", signatures.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, argument]
            )
        )
    command.__doc__ = report.find.__doc__
    command.__signature__ = signatures.Signature(parameters)  # type: ignore[attr-defined]
    cls = Question if report.about == "QUESTION" else ManyValues
    return takes(*report.takes, *_EVERY, examples=report.examples, cls=cls)(command)


eval = report_command(load_report("eval"))  # the report on one's own questions


def show(run: Run, report: Report, about: str | None = None) -> int | None:
    html = run.get(PageOptions).html  # refused before anything is computed
    with open_any_store(run) as store, run.out.job() as events:
        result = report.find(ReportContext(store, run.resolved, events, about))
        if html is not None:
            _write(run, html, result)
    run.out.result(result.value, human=lambda: _show(run, result.summary))
    return result.exit_code or None


def _show(run: Run, summary: Sequence[Shown]) -> None:
    for part in summary:
        if isinstance(part, str):
            run.out.prose(part)
        elif isinstance(part, Quote):
            run.out.quote(part.text)
        else:
            run.out.table(part.head, part.rows, part.title)


def _write(run: Run, path: Path, result: ReportResult) -> None:
    try:
        path.write_text(page(result.title, result.value, [*result.summary, *result.details]), encoding="utf-8")
    except OSError as error:
        raise KvtoolError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    run.out.status(f"written: {path}")
