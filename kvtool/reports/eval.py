"""`kvtool eval`: retrieval recall and the fusion mode to use, over questions on one's own documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import read_batch
from kvtool.reports.page import Section, Table
from kvtool.reports.quality import ASKED, RunOptions, compare_runs, quality_sections, read_at, with_interval
from kvtool.reports.report import QUESTIONS, BatchOptions, Report, ReportContext, ReportResult, ResumeOptions, Shown

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request

_WHY = 'one object a line: {"question", "answers"?, "sources"?}; or --make N writes some from the store\'s chunks'
_FEWER = (
    "fewer than asked for: passages of less than a few sentences are passed over, and questions that are not about "
    "their passage; more documents, or a larger model, give more"
)
_FEW = 20  # questions, below which the bootstrap's intervals are known to be too narrow


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Options, settings=False, group=QUESTIONS):
    """Questions that the model writes."""

    make: int | None = option(
        None,
        "Let the model write N questions about stored chunks to the file, and measure nothing.",
        metavar="N",
        lowest=1,
    )


def evaluate_own(context: ReportContext) -> ReportResult:
    """Measure retrieval and fusion modes on your own questions, and name the mode to take."""
    wanted = context.get(MakeOptions).make
    if context.about is None and wanted is not None:
        raise UsageError("--make needs a file to write the questions into", f"`kvtool eval made.jsonl --make {wanted}`")
    if wanted is not None and (runs := context.get(RunOptions).runs):
        then = f"`kvtool eval {context.about} --runs {','.join(runs)}` measures on them once they are made"
        raise UsageError("--make measures nothing yet, so --runs has no meaning with it", then)
    if context.about is None:
        raise UsageError("eval needs a file of questions", _WHY)
    path = Path(context.about)
    return _measure(context, path) if wanted is None else _make(context, path, wanted)


# ---- measuring ----


def _measure(context: ReportContext, path: Path) -> ReportResult:
    flags, requests = context.get(RunOptions), read_batch(path)  # before torch is imported
    from kvtool.core.retrieval.finder import Places
    from kvtool.reports.paired_run import parse_runs, usual_runs
    from kvtool.reports.summary import best, check_sources

    check_sources(Places(context.store), requests)
    value, rows, exit_code = compare_runs(context, requests, parse_runs(flags.runs) if flags.runs else usual_runs())
    value |= {"max_kl": flags.max_kl, "best": best(value["runs"], flags.max_kl)}
    value["synthetic"] = sum(bool(requests[at].generator) for at in rows)
    table, words = _table(value), [*_words(value)]
    shown: list[Shown] = [table, f"{counted(value['questions'], 'question')}, {read_at(value)}", *words]
    sections = [Section("Which mode", tuple(words), tables=(table,))]
    sections += quality_sections(value, f"{context.identity.model}, {path.name}")
    return ReportResult("Evaluation", value, shown, sections, path.name, exit_code)


def _table(value: Mapping[str, Any]) -> Table:
    rows = (
        (
            row["run"],
            *(with_interval(row, name) for name in ("f1", "contains", "kl_answer")),
            f"{row['recomputed_share']:.0%}",
            f"{row['ttft_ms_median']:.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in value["runs"]
    )
    return Table(("mode", "F1", "contains", "KL answer", "recomputed", "TTFT ms", "sooner"), tuple(rows))


def _words(value: Mapping[str, Any]) -> Iterator[str]:
    """Describe retrieval's results, the mode to use, and the reservations about both."""
    found = value.get("retrieval")
    if found:
        yield (
            f"retrieval: {with_interval(found, 'recall')} of the expected sources were found, for "
            f"{counted(found['count'], 'question')}; {found['complete']:.0%} of them have all of theirs, and the mean "
            f"reciprocal rank is {found['reciprocal_rank']:.2f}"
        )
    yield _advice(value["best"], value["max_kl"])
    if value["questions"] == 1:
        yield "1 question says nothing about others"
    elif value["questions"] < _FEW:
        yield f"{counted(value['questions'], 'question')}: the intervals of fewer than {_FEW} are too narrow"
    if value["synthetic"]:
        yield (
            f"{counted(value['synthetic'], 'question')} of {value['questions']} were written by a model from the "
            "passages that answer them: people's questions are found less well"
        )
    if value["incomplete"]:
        lacking = counted(value["incomplete"], "question")
        yield f"{lacking} lacked chunks of the store: what they say of reuse is too good"


def _advice(best: Mapping[str, Any], max_kl: float) -> str:
    if best["run"] is None:
        return "no mode but full prefill was asked for"
    near = f"the answer's KL is at most {max_kl:g} nats by the upper end of its interval"
    if best["within_limit"]:
        return f"take {best['run']}: it recomputes the least of the modes for which {near}"
    return f"no mode is so near to full prefill that {near}; the nearest is {best['run']} (--max-kl accepts more)"


# ---- making ----


def _make(context: ReportContext, path: Path, wanted: int) -> ReportResult:
    from kvtool.reports.question_generation import generate_questions

    if path.exists():
        raise UsageError(f"there is {str(path)!r} already", "name a new file for the questions that are written")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{str(path)!r} is in no folder that exists", "name a file in one")
    written: list[dict[str, Any]] = []
    read = 0
    context.events.step("questions", wanted, "questions")
    for request in generate_questions(context.session, wanted):
        read += 1
        if request is not None:
            written.append(_line(request))
            with path.open("a", encoding="utf-8") as file:  # an interrupted run leaves what it has written
                file.write(json.dumps(written[-1], ensure_ascii=False) + "\n")
            context.events.advance(1)
    value = {"resolved": {"model": context.identity.model}, "file": str(path), "requested": wanted, "passages": read}
    passages = counted(read, "passage")
    if not written:
        words: list[Shown] = [f"the model made no question of {passages}: nothing was written"]
        return ReportResult("Questions", value | {"written": written}, words, exit_code=EXIT_FAILED)
    rows = [(row["question"], "".join(row["answers"][:1]) or "-", row["sources"][0]) for row in written]
    kept = f"{counted(len(written), 'question')} of {wanted}, from {passages}"
    words = [Table(("question", "answer", "source"), tuple(rows))]
    words.append(f"{kept}, are in {path}: read them over before you believe what is measured on them")
    words += [_FEWER] if len(written) < wanted else []
    code = EXIT_PARTIAL if len(written) < wanted else EXIT_DONE
    return ReportResult("Questions", value | {"written": written}, words, exit_code=code)


def _line(request: Request) -> dict[str, Any]:
    """Make a line of the file; it says that a model wrote the question."""
    return {
        "question": request.question,
        "answers": [*request.answers],
        "sources": [*request.sources],
        "generator": request.generator,
    }


REPORT = Report(
    evaluate_own,
    takes=(
        *(BatchOptions.some("limit"), ResumeOptions, MakeOptions, RunOptions),
        *(QueryOptions.some(*ASKED), ModelOptions),
    ),
    about="QUESTIONS.jsonl",
    about_help="A file of questions: one object a line, with `question`, and `answers`, `sources` or both.",
    examples=(
        "eval questions.jsonl",
        "eval questions.jsonl --runs reuse,union:5% --html eval.html",
        "eval made.jsonl --make 20",
    ),
)
