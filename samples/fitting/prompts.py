"""The prompts that a fit learns from or is judged on: chunks of a store, and questions with full prefill's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Ids
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors import selector_for
from kvtool.core.model.decoder import Decoder
from kvtool.core.query.layout import Asked, lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request, read_batch
from kvtool.core.session.session import Session
from kvtool.lab.measure.runs import parse_run

ASKING = QueryOptions()

# A prompt's rows before its question: of each layer keys and values [1, kv_heads, rows, head_dim].
Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Chunks, and one or more questions on them with the greedy answers that full prefill gives.

    Attributes
    ----------
    session : whose model is the one that is fitted: it gives gradients.
    """

    session: Session
    asked: Asked
    questions: Sequence[Ids]
    answers: Sequence[Ids]

    @property
    def decoder(self) -> Decoder:
        return self.session.decoder

    @property
    def prefix(self) -> Ids:
        return self.asked.plan.segments[0].ids

    @property
    def chunks(self) -> list[Ids]:
        return [segment.ids for segment in self.asked.plan.segments[1:-1]]

    @property
    def length(self) -> int:
        """How many rows stand before the question."""
        return self.asked.plan.segments[-1].start

    def rows(self, run: str) -> Rows:
        """The rows before the question as a run of `inspect quality` gives them."""
        sides = [layer.view() for layer in fused(self.session, self.asked, run).cache.buffers]
        return [(keys[:, :, : self.length].clone(), values[:, :, : self.length].clone()) for keys, values in sides]


def fused(session: Session, asked: Asked, run: str, reserve: int = 0) -> Fused:
    """Fuse a laid out prompt as a run of `inspect quality` does."""
    spec = parse_run(run)
    selector = selector_for(spec.options(ASKING), spec.mode)
    return fuse(session.decoder, asked.plan, selector, session.source, reserve=reserve)


class Sets:
    """The prompts of several stores of one model, which is loaded twice: to answer fast, and to give gradients."""

    def __init__(self) -> None:
        self._fast: Decoder | None = None
        self._fitted: Decoder | None = None

    def read(self, store: Path, batch: Path, limit: int | None, max_tokens: int) -> list[Prompt]:
        """Lay the prompts of a batch file out and answer their questions; neighbours with the same documents share
        one."""
        opened = Store.open(store)
        fast = Session(opened, decoder=self._fast, warn=print)
        fitted = Session(opened, gradients=True, decoder=self._fitted, warn=print)
        self._fast, self._fitted = fast.decoder, fitted.decoder
        groups = [list(group) for _, group in groupby(read_batch(batch), key=lambda request: request.documents)]
        return [_prompt(fast, fitted, group, max_tokens) for group in groups[:limit]]


def _prompt(fast: Session, fitted: Session, requests: Sequence[Request], max_tokens: int) -> Prompt:
    asked = [lay_out(fast, request, ASKING) for request in requests]
    answers = []
    for one in asked:
        full = fused(fast, one, "full", reserve=max_tokens + 1)
        answers.append(tuple(Reference.answered(fast.decoder, full, max_tokens).answer.script))
    return Prompt(fitted, asked[0], [one.plan.segments[-1].ids for one in asked], answers)
