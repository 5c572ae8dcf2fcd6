"""`kvtool eval`: which fusion mode serves one's own documents, over questions that people or the model wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Section, Table
from kvtool.lab.reports.quality import ASKED, EvidenceOptions, base_run
from kvtool.lab.reports.questions import QUESTIONS, BatchOptions, ResumeOptions
from kvtool.lab.reports.report import Desk, Findings, Report
from kvtool.lab.reports.runs import RunOptions, evaluate, read_at

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request

_WHY = 'one object a line: {"question", "answers"?, "sources"?}; or --make N writes some from the store\'s chunks'

_FEWER = (
    "fewer than asked for: passages of less than a few sentences are passed over, and questions that are not about "
    "their passage; more documents, or a larger model, give more"
)


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Options, settings=False, group=QUESTIONS):
    """Questions where there are none."""

    make: int | None = option(
        None,
        "Let the model write N questions about stored chunks to the file, and measure nothing.",
        metavar="N",
        lowest=1,
    )


def evaluate_own(desk: Desk) -> Findings:
    """Measure on your own questions how well passages are found and modes answer, and name the mode to take."""
    wanted = desk.get(MakeOptions).make
    if desk.about is None and wanted is not None:
        raise UsageError("--make needs a file to write the questions into", f"`kvtool eval made.jsonl --make {wanted}`")
    if wanted is not None and (runs := desk.get(RunOptions).runs):
        then = f"`kvtool eval {desk.about} --runs {','.join(runs)}` measures on them once they are made"
        raise UsageError("--make measures nothing yet, so --runs has no meaning with it", then)
    if desk.about is None:
        raise UsageError("eval needs a file of questions", _WHY)
    path = Path(desk.about)
    return _asked(desk, path) if wanted is None else _made(desk, path, wanted)


# ---- asking ----


def _asked(desk: Desk, path: Path) -> Findings:
    from kvtool.core.query.reply import read_batch
    from kvtool.core.retrieval.finder import Places
    from kvtool.lab.charts.eval import own_table, own_text
    from kvtool.lab.charts.quality import quality_sections
    from kvtool.lab.measure.found import check_sources
    from kvtool.lab.measure.holdout import best, holdout
    from kvtool.lab.measure.quality import overview, quality_rows
    from kvtool.lab.measure.runs import RunSpec, parse_runs, usual_runs
    from kvtool.lab.measure.trial import NO_CONTEXT

    flags, evidence = desk.get(RunOptions), desk.get(EvidenceOptions)
    requests = read_batch(path)
    check_sources(Places(desk.store), requests)
    options = desk.query_options(*ASKED, max_tokens=flags.max_tokens, force=flags.force)
    specs = parse_runs(flags.runs) if flags.runs else usual_runs()
    beside = [RunSpec(NO_CONTEXT)] if evidence.no_context else []
    begin = partial(quality_rows, warn=desk.events.warn)
    results = evaluate(desk, requests, [*beside, *specs], options, begin)
    value: dict[str, Any] = {"resolved": {"model": desk.identity.model}, "max_tokens": flags.max_tokens}
    value |= {"failed": results.failed, **overview(results.rows, base_run(flags, specs))}
    value |= {"max_kl": evidence.max_kl, "best": best(value["runs"], evidence.max_kl)}
    value["made"] = sum(bool(requests[at].made_by) for at in results.rows)
    if evidence.holdout:
        value["holdout"] = holdout(results.rows, evidence.max_kl)
    told: list[str | Table] = [
        own_table(value),
        f"{counted(value['questions'], 'question')}, {read_at(value)}",
        *own_text(value),
    ]
    sections = [Section("Which mode", tuple(own_text(value)), tables=(own_table(value),))]
    sections += quality_sections(value, f"{desk.identity.model}, {path.name}")
    return Findings("Evaluation", value, told, sections, path.name, results.exit_code)


# ---- making ----


def _made(desk: Desk, path: Path, wanted: int) -> Findings:
    from kvtool.lab.charts.eval import made_table
    from kvtool.lab.measure.making import make_questions

    if path.exists():
        raise UsageError(f"there is {str(path)!r} already", "name a new file for the questions that are written")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{str(path)!r} is in no folder that exists", "name a file in one")
    written: list[Request] = []
    read = 0
    desk.events.step("questions", wanted, "questions")
    for request in make_questions(desk.session, wanted):
        read += 1
        if request is not None:
            written.append(request)
            with path.open("a", encoding="utf-8") as file:  # an interrupted run leaves what it has written
                file.write(json.dumps(_line(request), ensure_ascii=False) + "\n")
            desk.events.advance(1)
    value = {"resolved": {"model": desk.identity.model}, "file": str(path), "wanted": wanted, "passages": read}
    value |= {"written": [_line(request) for request in written]}
    told: list[str | Table] = [made_table(value)] if written else []
    kept = f"{counted(len(written), 'question')} of {wanted}, from {counted(read, 'passage')}"
    more = f", are in {path}: read them over before you believe what is measured on them"
    none = f"the model made no question of {counted(read, 'passage')}: nothing was written"
    words = [kept + more if written else none]
    if 0 < len(written) < wanted:
        words.append(_FEWER)
    code = EXIT_FAILED if not written else EXIT_PARTIAL if len(written) < wanted else EXIT_DONE
    return Findings("Questions", value, [*told, *words], exit_code=code)


def _line(request: Request) -> dict[str, Any]:
    """A line of the file that is written; it says of itself that no human asked this."""
    return {
        "question": request.question,
        "answers": [*request.answers],
        "sources": [*request.sources],
        "made_by": request.made_by,
    }


REPORT = Report(
    evaluate_own,
    takes=(
        *(BatchOptions.some("limit"), ResumeOptions, MakeOptions, RunOptions.some("runs", "max_tokens", "force")),
        *(EvidenceOptions, QueryOptions.some(*ASKED), ModelOptions),
    ),
    about="QUESTIONS.jsonl",
    about_help="A file of questions: one object a line, with `question`, and `answers`, `sources` or both.",
    examples=(
        "eval questions.jsonl",
        "eval questions.jsonl --runs reuse,union:5% --html eval.html",
        "eval made.jsonl --make 20",
    ),
)
