"""The questions that a report is about: one on the command line, or a file of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import ChunkChoice

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request
    from kvtool.lab.reports.report import Desk

QUESTIONS = "Questions"  # the heading in a report's help


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options, settings=False, group=QUESTIONS):
    """A file of questions."""

    batch: Path | None = option(None, "A file of questions.", metavar="FILE.jsonl", unit="path")
    limit: int | None = option(None, "Use only the first N questions.", metavar="N", lowest=1)

    def requests(self, report: str) -> list[Request]:
        """Read all questions of the file. Raises UsageError where none is named, or it cannot be read."""
        from kvtool.core.query.reply import read_batch

        if self.batch is None:
            raise UsageError(f"inspect {report} needs questions", "--batch FILE.jsonl, as for `kvtool query`")
        return read_batch(self.batch)

    @property
    def set_name(self) -> str:
        """The file with its folder, for a figure's title: `hotpotqa/batch.jsonl`."""
        return "/".join(self.batch.absolute().parts[-2:]) if self.batch else ""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(Options, settings=False, group=QUESTIONS):
    """The file that an evaluation's results are kept in: what may take hours can be interrupted."""

    resume: Path | None = option(
        None, "Save results to this file, and resume from it.", metavar="FILE.jsonl", unit="path"
    )


def questions(desk: Desk, report: str) -> list[Request]:
    """Take the question behind the report's name, or those of `--batch`, `--limit` of them.

    Raises
    ------
    UsageError : none, or both; chunks beside a file of questions, which brings its own.
    """
    given, choice = desk.get(BatchOptions), desk.get(ChunkChoice)
    if (desk.about is None) == (given.batch is None):
        raise UsageError(
            f"inspect {report} needs a question, or a file of them",
            f'kvtool inspect {report} "Who founded the observatory?", or --batch FILE.jsonl',
        )
    if given.batch is None:
        return [one_question(desk, report)]
    if choice.chunks or choice.documents:
        raise UsageError("--batch brings its own questions and chunks", "leave --chunks and --documents out")
    return given.requests(report)[: given.limit]


def one_question(desk: Desk, report: str) -> Request:
    """Take the question behind the report's name. Raises UsageError where there is none."""
    from kvtool.core.query.reply import Request

    if desk.about is None:
        raise UsageError(
            f"inspect {report} needs a question", f'kvtool inspect {report} "Who founded the observatory?"'
        )
    choice = desk.get(ChunkChoice)
    return Request(desk.about, choice.chunks, choice.documents)
