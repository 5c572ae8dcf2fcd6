"""`kvtool eval`: retrieval recall and the fusion mode to use, over questions on one's own documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.text import counted
from kvtool.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import read_batch
from kvtool.reports.report import (
    QUESTIONS,
    RETRIEVAL,
    BatchOptions,
    Report,
    ReportContext,
    ReportResult,
    ResumeOptions,
    Shown,
    Table,
)

if TYPE_CHECKING:
    from kvtool.reports.evaluation import RowsOf

_WHY = 'one object a line: {"question", "answers"?, "sources"?}; or --make N writes some from the store\'s chunks'
_FEWER = (
    "fewer than asked for: passages of less than a few sentences are passed over, and questions that are not about "
    "their passage; more documents, or a larger model, give more"
)
_ASKED = (*RETRIEVAL, "level")
_FEW = 20  # questions, below which the bootstrap's intervals are known to be too narrow
_ESTIMATES = {
    **{"F1": "f1", "F1 - full": "f1_difference", "contains": "contains", "contains - full": "contains_difference"},
    **{"KL first": "kl_first", "KL answer": "kl_answer"},
}
_NUMBERS = {
    **{"same first": ("top1_agrees", ".1%"), "same answer": ("answer_equal", ".1%")},
    **{"recomputed": ("recomputed_share", ".1%"), "TTFT ms": ("ttft_ms_median", ".0f"), "speedup": ("speedup", ".2f")},
}
_SHORT = ("run", "F1", "contains", "KL answer", "recomputed", "TTFT ms", "speedup")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options, settings=False, group="Runs"):
    runs: tuple[str, ...] = option(
        (), "Modes, each with how much it recomputes: reuse, epic:16, union:5% …", metavar="a,b:AMOUNT,c"
    )
    max_tokens: int = option(20, "Maximum length of an answer, in tokens.", lowest=1)
    force: bool = option(False, "Measure even if this model failed the self-check.")
    max_kl: float = option(
        0.05, "Maximum KL divergence of a mode that is recommended, in nats per token.", metavar="NATS", lowest=0
    )


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Options, settings=False, group=QUESTIONS):
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
    from kvtool.reports.evaluation import Journal, answer_open, evaluation_facts
    from kvtool.reports.questions import paired_rows, parse_run, parse_runs
    from kvtool.reports.summary import best, check_sources, overview

    identity = context.identity
    check_sources(Places(context.store), requests)
    identity.check_movable("a comparison of fusion modes")
    options = context.query_options(*_ASKED, max_tokens=flags.max_tokens, force=flags.force)
    runs = parse_runs(flags.runs)
    by_name = {spec.name: spec for spec in runs}
    facts = evaluation_facts(context.store, identity, requests, options)
    journal = Journal(context.get(ResumeOptions).resume, facts)

    def begin() -> RowsOf:
        if by_name and not flags.force:
            context.session.check_gate()
        return paired_rows(context.session, by_name, options, context.events.warn)

    asked = requests[: context.get(BatchOptions).limit]
    failed = answer_open(asked, list(by_name), journal, context.events, begin)
    rows = journal.rows
    base = runs[0] if flags.runs and runs else parse_run(QueryOptions().mode())  # with which others' KL is compared
    value: dict[str, Any] = {"resolved": {"model": identity.model}, "max_tokens": flags.max_tokens, "failed": failed}
    value |= overview(rows, base.name)
    value |= {"max_kl": flags.max_kl, "best": best(value["runs"], flags.max_kl)}
    value["synthetic"] = sum(bool(requests[at].generator) for at in rows)
    levels = f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"
    about = f"{counted(value['questions'], 'question')}, {levels}"
    shown: list[Shown] = [_runs_table(value, _SHORT), about, *_words(value)]
    paired = f"Paired by question, {value['resamples']:,} resamples; `kvtool help concepts` explains the columns"
    details: list[Shown] = [_runs_table(value), paired]
    exit_code = EXIT_DONE if not failed else EXIT_PARTIAL if rows else EXIT_FAILED
    return ReportResult(f"Evaluation, {path.name}", value, shown, details, exit_code)


def _words(value: Mapping[str, Any]) -> Iterator[str]:
    found = value.get("retrieval")
    if found:
        yield (
            f"retrieval: {_with_interval(found, 'recall')} of the expected sources were found, for "
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
        yield f"{lacking} had missing chunks, so their results for reuse are optimistic"


def _advice(best: Mapping[str, Any], max_kl: float) -> str:
    if best["run"] is None:
        return "no mode but full prefill was asked for"
    near = f"the answer's KL is at most {max_kl:g} nats by the upper end of its interval"
    if best["within_limit"]:
        return f"take {best['run']}: it recomputes the least of the modes for which {near}"
    return f"no mode is so near to full prefill that {near}; the nearest is {best['run']} (--max-kl accepts more)"


# ---- the table ----


def _runs_table(value: Mapping[str, Any], heads: tuple[str, ...] = ()) -> Table:
    estimates = {**_ESTIMATES}
    if value["kl_base"]:
        estimates |= {f"KL {of} - {value['kl_base']}": f"kl_{of}_difference" for of in ("first", "answer")}
    rows = [
        {
            **{"run": row["run"], "n": str(row["count"]), "Pareto": "*" if row["pareto"] else ""},
            **{head: _with_interval(row, name) for head, name in estimates.items()},
            **{head: f"{row[name]:{form}}" for head, (name, form) in _NUMBERS.items()},
        }
        for row in value["runs"]
    ]
    heads = heads or ("run", "n", *estimates, *_NUMBERS, "Pareto")
    return Table(heads, tuple(tuple(row[head] for head in heads) for row in rows))


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "-"
    sign = "+" if name.endswith("_difference") else ""
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


# ---- making ----


def _make(context: ReportContext, path: Path, wanted: int) -> ReportResult:
    from kvtool.reports.questions import generate_questions

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
            row = {name: getattr(request, name) for name in ("question", "answers", "sources", "generator")}
            written.append(row)
            with path.open("a", encoding="utf-8") as file:  # an interrupted run leaves what it has written
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            context.events.advance(1)
    value = {"resolved": {"model": context.identity.model}, "file": str(path), "requested": wanted, "passages": read}
    passages = counted(read, "passage")
    if not written:
        words: list[Shown] = [f"the model made no question of {passages}: nothing was written", _FEWER]
        return ReportResult("Questions", value | {"written": written}, words, exit_code=EXIT_FAILED)
    rows = [(row["question"], "".join(row["answers"][:1]) or "-", row["sources"][0]) for row in written]
    kept = f"{counted(len(written), 'question')} of {wanted}, from {passages}"
    words = [Table(("question", "answer", "source"), tuple(rows))]
    words.append(f"{kept}, are in {path}: review them before you trust results based on them")
    words += [_FEWER] if len(written) < wanted else []
    code = EXIT_PARTIAL if len(written) < wanted else EXIT_DONE
    return ReportResult("Questions", value | {"written": written}, words, exit_code=code)


EVAL = Report(
    evaluate_own,
    takes=(
        *(BatchOptions.some("limit"), ResumeOptions, MakeOptions, RunOptions),
        *(QueryOptions.some(*_ASKED), ModelOptions),
    ),
    about="QUESTIONS.jsonl",
    about_help="A file of questions: one object a line, with `question`, and `answers`, `sources` or both.",
    examples=(
        "eval questions.jsonl",
        "eval questions.jsonl --runs reuse,union:5% --html eval.html",
        "eval made.jsonl --make 20",
    ),
)
