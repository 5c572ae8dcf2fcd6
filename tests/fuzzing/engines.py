"""A long-lived session and engine of `serve`, compared with fresh ones after each change that others make to a store.

    python -m tests.fuzzing.engines --seconds 3600 --seed 1 [--family NAME] [--steps 25-60]

The store lives as in `lives.py`. After each step the same question with the same options is asked of a session that has
been open all along, of an engine with the conversations that it keeps, and of a session and an engine that are opened
just now, over a copy of the store. Token ids, rows, sources, logits and answers have to be equal.
"""

from __future__ import annotations

import random
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import kvtool
from kvtool.core.errors import KvtoolError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Job, Turns
from kvtool.serve.options import ServeOptions
from tests.cli.working import Done
from tests.cli.working import kvtool as command
from tests.fusion.making import MOE, distance
from tests.fuzzing.checks import require
from tests.fuzzing.lives import COUNT, StoreLife
from tests.fuzzing.runs import Step, main
from tests.serve.conftest import ask as answer_of

STEPS = (
    *(("turn", 12), ("edit", 14), ("lead_in", 7), ("instruction", 4), ("remade", 6), ("compress", 5), ("drop_raw", 3)),
    *(("prune", 3), ("compact", 3), ("budget", 1), ("forget", 3), ("holes", 3), ("replaced", 2), ("new_talk", 2)),
    *(("pack", 1), ("old_pack", 2), ("reorder", 2)),
)
_SAME = 1e-4  # of logits that deviate by 3: held and recomputed turns were computed in other batches
_TALKS = 2  # conversations at the same time
_TURNS = 5  # of a conversation; then another begins
_SECONDS = 120.0


@dataclass(frozen=True)
class Said:
    """The outcome of a question; `error`: instead of an answer."""

    error: str = ""
    answer: str = ""
    ids: tuple[int, ...] = ()
    segments: tuple[Any, ...] = ()
    tokens: tuple[tuple[str, int], ...] = ()
    chunks: tuple[Any, ...] = ()
    places: tuple[str, ...] = ()
    logits: torch.Tensor | None = None

    @classmethod
    def of(cls, reply: Reply, text: str | None = None) -> Said:
        plan = reply.fused.plan
        kinds = ("prompt", "reused", "recomputed", "dropped", "shifted", "generated")
        return cls(
            answer=reply.answer if text is None else text,
            ids=tuple(plan.text_ids),
            segments=tuple((one.status, one.source.level, one.source.ids) for one in plan.segments[1:]),
            tokens=tuple((kind, reply.tokens[kind]) for kind in kinds),
            chunks=tuple((one.id, one.source, one.start, one.text, one.status) for one in reply.chunks),
            places=tuple(reply.places),
            logits=reply.fused.logits.clone(),
        )


class EngineLife(StoreLife):
    """The life of a store with an engine over it. `near` is the session that stays open."""

    def __init__(self, family: str, seed: int, model: Path, folder: Path) -> None:
        self.helper = get_context("fork").Pool(1)  # runs commands; forked before a store is open here
        self.engine: Engine | None = None
        try:
            super().__init__(family, seed, model, folder)
            self.engine = self._engine(self.store, 10**9)
        except BaseException:
            self.helper.terminate()
            raise
        dice = random.Random(f"talk {seed} {family}")
        self.talks: list[tuple[Turns, QueryOptions]] = [((), self._talking(dice)) for _ in range(_TALKS)]

    def live(self, step: Step) -> None:
        dice = step.dice(self.seed, self.family)
        getattr(self, f"_{step.name}")(dice)
        self._compared(dice)
        for number in range(_TALKS):
            self._talked(number, dice)

    def end(self) -> None:
        dice = random.Random(f"end {self.seed} {self.family}")
        for _ in range(3):
            self._compared(dice)

    def close(self) -> None:
        super().close()
        if self.engine is not None:
            self.engine.close()
        self.helper.terminate()

    # ---- both sides ----

    def _engine(self, store: Path, keep: int) -> Engine:
        model = ModelOptions(model=str(self.model), offline=True, dtype="float32")
        options = ServeOptions(keep_conversations=keep, memory_cache=min(keep, 10**8))
        engine = Engine(store, model, lambda text, hint: None, options)
        engine.start()
        return engine

    def _copied(self) -> Path:
        """The store as it is now: nothing that one side keeps of a question reaches the other."""
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        return Path(shutil.copytree(self.store, self.folder / "copy"))

    def _compared(self, dice: random.Random, **more: Any) -> None:
        """A single question: the session and the engine that were open, and fresh ones."""
        asked, question = self._options(dice) | more, self.corpus.question(dice)
        copy = self._copied()
        ours = _asked(self.near, question, asked)
        with self._opened(copy) as fresh:
            theirs = _asked(fresh, question, asked)
        self._equal(ours, theirs, f"a session, {asked}")
        self.checks["session"] += 1
        options = QueryOptions(**asked, offline=True)
        self._both_engines(Ask(Request(question), options), f"an engine, {asked}")
        self.checks["engine"] += 1

    def _talked(self, number: int, dice: random.Random) -> None:
        """Ask the next question of a conversation that the engine may hold, and of one that is computed anew. It
        continues from its last turn: the held state is the one after that turn."""
        turns, options = self.talks[number]
        question = self.corpus.question(dice)
        what = f"turn {len(turns) + 1} of a conversation, fusion {options.fusion}, max_loss {options.max_loss}"
        said = self._both_engines(Ask(Request(question), options, turns=turns), what)
        self.checks["conversation"] += 1
        if len(turns) + 1 >= _TURNS:
            self._new_talk(dice, number)
        elif not said.error:
            self.talks[number] = (*turns, (question, said.answer)), options

    def _both_engines(self, ask: Ask, what: str) -> Said:
        assert self.engine is not None
        copy = self._copied()
        ours = _told(self.engine, ask)
        with closing(self._engine(copy, 0)) as fresh:
            theirs = _told(fresh, ask)
        self._equal(ours, theirs, what)
        return ours

    def _equal(self, ours: Said, fresh: Said, what: str) -> None:
        require(ours.error == fresh.error, f"{what}: error {ours.error!r}, fresh {fresh.error!r}")
        if ours.error:
            self.checks["refused"] += 1
            return
        for name in ("ids", "chunks", "places", "segments", "tokens"):
            one, other = getattr(ours, name), getattr(fresh, name)
            require(one == other, f"{what}: {name} differ{_first(one, other)}")
        assert ours.logits is not None
        assert fresh.logits is not None
        off = distance(ours.logits, fresh.logits)
        require(off <= (1e-3 if self.family in MOE else _SAME), f"{what}: logits differ by {off:.2g}")
        require(ours.answer == fresh.answer, f"{what}: {ours.answer!r}, fresh {fresh.answer!r}")

    def _options(self, dice: random.Random) -> dict[str, Any]:
        modes = ("prefix", "full") if self.states else ("full", "prefix", "reuse", "epic", "blend")
        mode = dice.choice(modes if self.states else (*modes, "infoflow", "union", "union"))
        asked: dict[str, Any] = {"fusion": mode, "top_k": dice.randint(1, 3), "max_tokens": COUNT}
        asked["order"] = dice.choice(("relevance", "best-last", "document"))
        asked["max_loss"] = dice.choice((0.0, 0.01, 10.0))
        if dice.random() < 0.3:
            asked["level"] = dice.choice(("raw", "1", "2", "3", "4"))
        if dice.random() < 0.2:
            asked["system"] = "Answer in one word."
        return asked

    def _talking(self, dice: random.Random) -> QueryOptions:
        asked = self._options(dice) | {"fusion": "prefix"} if self.states else self._options(dice)
        return QueryOptions(**asked, offline=True)

    # ---- steps that a life without an engine has not ----

    def _command(self, *words: object) -> Done:
        """Run a command in another process; what is open here stays open."""
        return self.helper.apply_async(command, [*words, "--store", self.store]).get(_SECONDS)

    def _turn(self, dice: random.Random) -> None:
        """Nothing changes: conversations go on."""

    def _new_talk(self, dice: random.Random, number: int = 0) -> None:
        self.talks[number] = (), self._talking(dice)

    def _remade(self, dice: random.Random) -> None:
        """The same lossy level is made otherwise: its records have other numbers under the same names."""
        level = dice.choice(("1", "2", "3", "4"))
        for how in dice.sample((1, 2, 3), 2):
            words = ("--fit", "--fit-prompts", how)
            self._command("compress", "--level", level, *words, "--questions", dice.choice((0, 2)))
            self._compared(dice, level=level)

    def _reorder(self, dice: random.Random) -> None:
        for path in sorted(self.corpus.texts())[1:]:
            self._command("store", "rm", path, "--yes")
        self._by_command("ingest", dice)

    def _replaced(self, dice: random.Random) -> None:
        """Put another store in its place. A session reports it, and is opened again."""
        aside = self.folder / "aside"
        shutil.rmtree(aside, ignore_errors=True)
        self.store.rename(aside)
        self._by_command("ingest", dice)
        self._reopen(dice)

    def _reopen(self, dice: random.Random) -> None:
        super().close()
        self.near, self.far = self._opened(), self._opened()


def _asked(cache: kvtool.Cache, question: str, asked: dict[str, Any]) -> Said:
    try:
        return Said.of(cache.query(question, **asked))
    except KvtoolError as error:
        return Said(error=f"{type(error).__name__}: {error.message}")


def _told(engine: Engine, ask: Ask) -> Said:
    replies: list[Said] = []
    of = Answer.of

    def noted(reply: Reply, job: Job, prepared: Any) -> Answer:
        answer = of(reply, job, prepared)
        replies.append(Said.of(reply, answer.text))
        return answer

    with patch.object(Answer, "of", noted):
        try:
            answer_of(engine, ask)
        except KvtoolError as error:
            return Said(error=f"{type(error).__name__}: {error.message}")
    return replies[-1]


def _first(one: Any, other: Any) -> str:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f" at {at}: {str(a)[:120]}, fresh {str(b)[:120]}"
    return f": {len(one)} and {len(other)}"


if __name__ == "__main__":
    sys.exit(main(EngineLife, STEPS, "engines"))
