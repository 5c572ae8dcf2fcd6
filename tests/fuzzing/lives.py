"""Random lives of a store, each step held against plain `transformers` and against KV that is computed anew.

    python -m tests.fuzzing.lives --seconds 3600 --seed 1 [--family NAME] [--steps 25-60]

A life is a tiny model of one family and some documents: they are edited, swapped, removed and ingested after other
lead-ins, compressed, pruned, packed, pushed and pulled; a byte is flipped, a command killed, another session left
open. After each step the store, and some answers, are held against what they have to be (`checks.py`).
"""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError, NoSpaceError, NothingFoundError, UsageError
from kvtool.core.query.reply import Reply
from tests.chaos.injury import AGE, flip_bit, live_regions
from tests.cli.working import Done
from tests.families import HYBRIDS
from tests.fusion.making import MOE
from tests.fuzzing import children
from tests.fuzzing.checks import Checks, require
from tests.fuzzing.corpus import Corpus
from tests.fuzzing.reference import Reference
from tests.fuzzing.runs import Step, WrongError, main

STEPS = (
    *(("ask", 14), ("edit", 10), ("lead_in", 6), ("instruction", 2), ("compress", 7), ("keep", 4), ("drop_raw", 3)),
    *(("prune", 4), ("pin", 2), ("budget", 2), ("compact", 3), ("flip", 4), ("pack", 4), ("old_pack", 2), ("tier", 4)),
    *(("pull", 2), ("front", 3), ("kill", 6), ("stale", 5), ("chat", 5), ("reopen", 2), ("forget", 3), ("holes", 3)),
)
MODES = ("full", "prefix", "reuse", "epic", "blend", "infoflow", "union", "auto")
_CHUNK = 48  # tokens
_LEAD_INS = ("warm", "prefix", "bos", "none", "neighbour", "sink:3", "sink:7")
COUNT = 4  # tokens of an answer
_REFUSED = (UsageError, NothingFoundError, NoSpaceError)
_MAY_BE = (
    "was made with another",  # two stores that may not be joined
    "no exact record is left",
    "the codec profile",  # repair took it away: the hint is to fit another
)
_REFUSALS = (1, 2)  # their exit codes
_REPORTED = (10, 12, 13)  # no store, misfit, damaged
_REGIONS = ("tree page", "meta page in use", "list of free pages", "page header", AGE)


class StoreLife:
    """A life; see the module.

    Attributes
    ----------
    committed : text by source: what the store has to hold.
    current : whether all of it was ingested after the lead-in that the store has now.
    """

    def __init__(self, family: str, seed: int, model: Path, folder: Path) -> None:
        dice = random.Random(f"begin {seed} {family}")
        self.family, self.seed, self.folder, self.model = family, seed, folder, model
        rounded = family not in MOE and family not in HYBRIDS and dice.random() < 0.25
        self.dtype = "bfloat16" if rounded else "float32"
        self.checking = Checks(Reference(family, model, self.dtype))
        self.checks: Counter[str] = self.checking.done
        self.corpus = Corpus.begin(folder / "corpus", dice, dice.randint(3, 5))
        self.committed: dict[str, str] = {}
        self.current, self.tiers = True, 0
        self.system: str | None = None  # the store's instruction, where it is not the default
        self.warned: list[str] = []
        self.states = family in HYBRIDS
        self.store = folder / "store"
        self.near, self.far = self._opened(), self._opened()
        self.lead_in = self._any_lead_in(dice)
        self._ingest(dice)

    def live(self, step: Step) -> None:
        dice = step.dice(self.seed, self.family)
        self.warned.clear()
        getattr(self, f"_{step.name}")(dice)
        if step.name != "flip":
            damage = [text for text in self.warned if "damage" in text]
            require(not damage, f"damage is told where there is none: {damage[:2]}")
        self.checking.store(self.store, self.committed, self.current)
        if not self.states:
            self.checking.records(self.store, dice, 1)
        self._asked(self.near, dice)

    def end(self) -> None:
        """All is ingested once more; then the store answers as one that is made anew of the same files."""
        dice = random.Random(f"end {self.seed} {self.family}")
        self._ingest(dice)
        self.checking.sound(self.store)
        self.checking.records(self.store, dice, 4)
        fresh = self._opened(self.folder / "anew")
        with fresh:
            fresh.ingest(self.corpus.folder, **self._making(), system=self.system)
            for _ in range(3):
                asked = self._options(dice) | {"level": "raw"}
                question = self.corpus.question(dice)
                ours, anew = self._try(self.near, question, asked), self._try(fresh, question, asked)
                require((ours is None) == (anew is None), "a store made anew answers what this one does not, or not")
                if ours is not None and anew is not None:
                    self.checking.alike(ours, anew, "a store made anew")

    def close(self) -> None:
        self.near.close()
        self.far.close()

    # ---- what steps share ----

    def _opened(self, place: Path | str | None = None) -> kvtool.Cache:
        where = self.store if place is None else place
        return kvtool.open(where, model=str(self.model), offline=True, dtype="float32", warn=self._warn)

    def _warn(self, text: str, hint: str) -> None:
        self.warned.append(text)

    def _making(self) -> dict[str, Any]:
        return {"chunk_tokens": _CHUNK, "lead_in": self.lead_in, "store_dtype": self.dtype, "sync": True}

    def _any_lead_in(self, dice: random.Random) -> str:
        if self.states:
            return "none"
        none = "warm" if self.family == "phi3-longrope" else ""  # too long for one rope
        return dice.choice([one for one in _LEAD_INS if one != none])

    def _ingest(self, dice: random.Random, cache: kvtool.Cache | None = None, **options: Any) -> None:
        report = (cache or self.near).ingest(self.corpus.folder, **(self._making() | options))
        require(not report.failures, f"files failed: {report.failures}")
        self.committed, self.current = self.corpus.texts(), True

    def _refused(self, work: Callable[[], Any]) -> bool:
        try:
            work()
            return False
        except _REFUSED:
            pass
        except KvtoolError as error:
            if not any(text in error.message for text in _MAY_BE):
                raise
        self.checks["refused"] += 1
        return True

    def _options(self, dice: random.Random) -> dict[str, Any]:
        mode = dice.choice(("full", "prefix", "prefix") if self.states else MODES)
        asked: dict[str, Any] = {"fusion": mode, "top_k": dice.randint(1, 4), "max_tokens": COUNT}
        asked["order"] = dice.choice(("relevance", "best-last", "document"))
        if mode in ("blend", "infoflow", "union", "auto"):
            asked["ratio"] = dice.choice((0.0, 0.15, 0.5, 1.0))
        if mode == "epic":
            asked |= {"link_tokens": dice.choice((0, 2, 16, 1000)), "shift": dice.random() < 0.5}
            asked["link"] = dice.choice(("initial", "final", "boundary"))
        if dice.random() < 0.3:
            asked["level"] = dice.choice(("raw", "lossless", "1", "2", "3", "4"))
        elif dice.random() < 0.5:
            asked["max_loss"] = dice.choice((0.0, 0.01, 10.0))
        if dice.random() < 0.15:
            asked["system"] = "Answer in one word."
        return asked

    def _try(self, cache: kvtool.Cache, question: str, asked: dict[str, Any]) -> Reply | None:
        return self._got(lambda: cache.query(question, **asked))

    def _got(self, ask: Callable[[], Reply]) -> Reply | None:
        replies: list[Reply] = []
        self._refused(lambda: replies.append(ask()))
        return replies[0] if replies else None

    def _asked(self, cache: kvtool.Cache, dice: random.Random, committed: dict[str, str] | None = None) -> None:
        """A question, held against its reference."""
        asked, question = self._options(dice), self.corpus.question(dice)
        if dice.random() < 0.2:
            asked["documents"] = dice.choice(sorted(self.committed if committed is None else committed))
        reply = self._try(cache, question, asked)
        if reply is not None:
            self._held(reply, self.committed if committed is None else committed)

    def _held(self, reply: Reply, committed: dict[str, str]) -> None:
        try:
            self.checking.answer(reply, committed, COUNT)
        except WrongError as error:
            segments = [(one.status, one.source.level, len(one.ids), one.reason) for one in reply.fused.plan.segments]
            raise WrongError(f"{error} ({reply.selector}, {segments})") from error

    # ---- questions ----

    def _ask(self, dice: random.Random) -> None:
        for _ in range(4):
            self._asked(dice.choice((self.near, self.far)), dice)

    def _stale(self, dice: random.Random) -> None:
        """The other session asks too, then writes; and this one is asked again."""
        for cache in (self.far, self.near):
            asked, question = self._options(dice), self.corpus.question(dice)
            ours, theirs = self._try(self.near, question, asked), self._try(self.far, question, asked)
            require((ours is None) == (theirs is None), "one of two sessions answers")
            if ours is not None and theirs is not None:
                self.checking.alike(ours, theirs, "two sessions")
            self.corpus.change(dice)
            self._ingest(dice, cache)

    def _chat(self, dice: random.Random) -> None:
        """Turns that see each other: all computed they are what transformers gives for all of their tokens."""
        mode = "prefix" if self.states else dice.choice(("full", "full", "union", "reuse", "epic"))
        asked: dict[str, Any] = {"fusion": mode, "top_k": 2, "max_tokens": COUNT}
        talks = [cache.conversation(**asked) for cache in (self.near, self.far)]
        for number in range(dice.randint(2, 4)):
            question = self.corpus.question(dice)
            near, far = (self._got(partial(talk.ask, question)) for talk in talks)
            require((near is None) == (far is None), "one of two conversations answers")
            if near is None or far is None:
                return
            alike = self.checking.alike(near, far, f"turn {number + 1} of two conversations")
            if mode in ("full", "prefix"):
                self.checking.answer(near, self.committed, COUNT, alone=False)
            if not alike:
                return

    def _reopen(self, dice: random.Random) -> None:
        self.close()
        self.near, self.far = self._opened(), self._opened()

    # ---- documents ----

    def _edit(self, dice: random.Random) -> None:
        for _ in range(dice.randint(1, 3)):
            self.corpus.change(dice)
        how = dice.random()
        if how < 0.6:
            self._ingest(dice, dice.choice((self.near, self.far)), level=dice.choice(("raw", "raw", "lossless")))
        elif how < 0.8:
            self._one_file(dice)
        else:
            self._by_command("ingest", dice)

    def _one_file(self, dice: random.Random) -> None:
        """One file is ingested; what the others hold stays as it was."""
        path = self.corpus.any_path(dice)
        options = self._making() | {"sync": False}
        self.near.ingest(path, **options)
        self.committed = self.committed | {path: self.corpus.texts()[path]}

    def _lead_in(self, dice: random.Random) -> None:
        self.lead_in = self._any_lead_in(dice)
        if dice.random() < 0.7:
            self._ingest(dice)
        else:
            self.current = False
            self._one_file(dice)

    def _instruction(self, dice: random.Random) -> None:
        self.system = dice.choice(("Say it in a few words.", "Answer briefly, from the passages."))
        self._ingest(dice, system=self.system)

    def _forget(self, dice: random.Random) -> None:
        source = dice.choice(sorted(self.committed))
        if len(self.committed) > 2 and not self._refused(lambda: dice.choice((self.near, self.far)).rm(source)):
            self.committed = {name: text for name, text in self.committed.items() if name != source}

    def _holes(self, dice: random.Random) -> None:
        """Records are gone, their descriptions stay: a question computes them in place."""
        with Store.open(self.store) as store, store.writer() as writer:
            names = [name for name in store.chunk_ids() if store.levels(name)]
            some = dice.sample(names, min(len(names), dice.randint(1, 4)))
            for name in some:
                for level in store.levels(name):
                    writer.drop_level([name], level)
        for cache in (self.near, self.far):
            self._asked(cache, dice)

    # ---- levels and sizes ----

    def _compress(self, dice: random.Random) -> None:
        levels = dice.sample(("lossless", "1", "2", "3", "4"), dice.randint(1, 3))
        fits = not self.states and self.dtype == "float32" and dice.random() < 0.15
        self._refused(lambda: self.near.compress(*levels, questions=dice.choice((0, 0, 2)), fit=fits, fit_prompts=2))

    def _keep(self, dice: random.Random) -> None:
        share = dice.choice((0.75, 0.5, 0.25))
        levels = dice.sample(("raw", "lossless", "2"), 1)
        self._refused(lambda: self.near.compress(*levels, keep=share, questions=0))

    def _drop_raw(self, dice: random.Random) -> None:
        level = dice.choice(("lossless", "1", "2"))
        self._refused(lambda: self.far.compress(level, keep_raw=False, yes=True, questions=0))

    def _prune(self, dice: random.Random) -> None:
        size = sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())
        how = dice.choice(({"max_size": int(size * dice.uniform(0.3, 1.0))}, {"cold": 0.0}))
        before = set(self.committed)
        self._refused(lambda: self.near.prune(**how, yes=True))
        with Store.open(self.store) as store:
            left = set(store.sources())
        require(left <= before and ("cold" not in how or left == before), "prune left other documents")
        self.committed = {name: text for name, text in self.committed.items() if name in left}
        if len(self.committed) < 2:
            self._ingest(dice)

    def _pin(self, dice: random.Random) -> None:
        source = dice.choice(sorted(self.committed))
        for more in ((), ("--remove",))[: dice.randint(1, 2)]:
            self._command("store", "pin", source, *more)

    def _budget(self, dice: random.Random) -> None:
        self._refused(lambda: self.near.budget(dice.choice(("none", "1GB"))))

    def _compact(self, dice: random.Random) -> None:
        dice.choice((self.near, self.far)).compact()

    # ---- damage and kills ----

    def _command(self, *words: object) -> Done:
        """Run a command in another process; all that is open here is closed meanwhile."""
        self.close()
        try:
            return children.command(*words, "--store", self.store)
        finally:
            self.near, self.far = self._opened(), self._opened()

    def _by_command(self, what: str, dice: random.Random) -> None:
        done = self._command(*self._words(what, dice))
        require(done.code == 0, f"{what}: exit {done.code}: {done.err[-300:]}")
        if what == "ingest":
            self.committed, self.current = self.corpus.texts(), True

    def _words(self, what: str, dice: random.Random) -> list[object]:
        if what == "ingest":
            made = ["--chunk-tokens", _CHUNK, "--lead-in", self.lead_in, "--store-dtype", self.dtype, "--sync"]
            return ["ingest", self.corpus.folder, "--model", self.model, "--dtype", "float32", *made]
        if what == "compress":
            levels = dice.sample(("1", "2", "3"), 2)
            return ["compress", "--level", levels[0], "--level", levels[1], "--questions", 0, "--dtype", "float32"]
        if what == "prune":
            return ["store", "prune", "--cold", 0, "--yes"]
        return ["store", "compact"]

    def _flip(self, dice: random.Random) -> None:
        """Flip one bit of a value: it is a reported miss, repair removes it, and an ingest makes it whole."""
        self.close()
        data = next(self.store.glob("data/gen-*/data.mdb"))
        regions = [one for one in live_regions(data) if one.kind not in _REGIONS]
        kinds = sorted({one.kind for one in regions})
        kind = dice.choice(kinds)
        region = dice.choice([one for one in regions if one.kind == kind])
        at = dice.randrange(region.start, region.stop)
        data.write_bytes(flip_bit(data.read_bytes(), at, dice.randrange(8)))
        asked = ["query", self.corpus.question(dice), "--fusion", "prefix" if self.states else dice.choice(MODES[:5])]
        done = children.command(*asked, "--max-tokens", 2, "--dtype", "float32", "--json", "--store", self.store)
        require(done.code in (0, *_REFUSALS, *_REPORTED), f"{kind} flipped, query: {done.code}: {done.err[-300:]}")
        if kind == "meta":  # the settings of the store are lost, and may only be reported
            self.near, self.far = self._anew()
            return
        done = children.command("store", "verify", "--repair", "--json", "--store", self.store)
        require(done.code in (0, 13), f"{kind} flipped, repair: exit {done.code}: {done.err[-300:]}")
        done = children.command(*self._words("ingest", dice), "--store", self.store)
        require(done.code == 0, f"{kind} flipped, ingest: exit {done.code}: {done.err[-300:]}")
        self.committed, self.current = self.corpus.texts(), True
        self.near, self.far = self._opened(), self._opened()
        self.checking.sound(self.store)

    def _anew(self) -> tuple[kvtool.Cache, kvtool.Cache]:
        shutil.rmtree(self.store)
        near, far = self._opened(), self._opened()
        near.ingest(self.corpus.folder, **self._making(), system=self.system)
        self.committed, self.current = self.corpus.texts(), True
        return near, far

    def _kill(self, dice: random.Random) -> None:
        """A command is killed: each document is as it was or as it is to be; then it may run again."""
        what = dice.choice(("ingest", "ingest", "compress", "prune", "compact"))
        if self.states and what == "compress":
            what = "ingest"
        before = dict(self.committed)
        if what == "ingest":
            self.corpus.change(dice)
            self.corpus.change(dice)
            self.current = False
        self.close()
        try:
            at = int(10 ** dice.uniform(1, 4))
            done = children.command(*self._words(what, dice), "--store", self.store, kill_at=at)
        finally:
            self.near, self.far = self._opened(), self._opened()
        self.checks["killed"] += done.code == children.KILLED
        self._take_either(before, self.corpus.texts() if what == "ingest" else before)
        self.checking.sound(self.store)
        if dice.random() < 0.5:
            self._ingest(dice)

    def _take_either(self, before: dict[str, str], after: dict[str, str]) -> None:
        """What the store holds becomes what it has to hold, if each document is one of the two."""
        found: dict[str, str] = {}
        with Store.open(self.store) as store:
            for source in store.sources():
                document = store.document(source)
                text = "" if document is None else document.text.strip()
                either = [one[source] for one in (before, after) if source in one and one[source].strip() == text]
                require(bool(either), f"{source} is neither what it was nor what it was to be")
                found[source] = either[0]
        lost = [name for name in before if name in after and name not in found]
        require(not lost, f"{lost[:3]} are lost")
        self.committed = found

    # ---- elsewhere ----

    @property
    def tier(self) -> str:
        return f"file://{self.folder / f'tier{self.tiers}'}"

    def _pack(self, dice: random.Random) -> None:
        """A pack makes another store, which holds and answers the same."""
        pack, other = self.folder / "store.kvpack", self.folder / f"packed-{dice.getrandbits(30)}"
        self.near.export(pack, force=True)
        self.packed = dict(self.committed)
        self._filled(other, lambda cache: cache.import_(pack), dice)

    def _old_pack(self, dice: random.Random) -> None:
        self._joined(getattr(self, "packed", None), lambda: self.near.take(self.folder / "store.kvpack"), dice)

    def _tier(self, dice: random.Random) -> None:
        if self._refused(lambda: self.near.push(self.tier, delete=True, yes=True)):
            self.tiers += 1  # the one before was made with another lead-in, or instruction
            self.near.push(self.tier)
        self.pushed = dict(self.committed)
        self._filled(self.folder / f"pulled-{dice.getrandbits(30)}", lambda cache: cache.pull(self.tier), dice)

    def _pull(self, dice: random.Random) -> None:
        self._joined(getattr(self, "pushed", None), lambda: self.near.pull(self.tier), dice)

    def _filled(self, other: Path, fill: Callable[[kvtool.Cache], object], dice: random.Random) -> None:
        with self._opened(other) as cache:
            fill(cache)
            self.checking.store(other, self.committed)
            self._asked(cache, dice)
            self._asked(cache, dice)

    def _joined(self, older: dict[str, str] | None, take: Callable[[], object], dice: random.Random) -> None:
        if older is None or self._refused(take):
            return
        self.current = False
        self._take_either({**older, **self.committed}, older)
        self._ingest(dice)

    def _front(self, dice: random.Random) -> None:
        """Ask a shared store by its URL: what is read from it stays in a local cache."""
        pushed: dict[str, str] | None = getattr(self, "pushed", None)
        if pushed is None:
            return self._tier(dice)
        with self._opened(self.tier) as cache:
            for _ in range(3):
                self._asked(cache, dice, pushed)
        return None


if __name__ == "__main__":
    sys.exit(main(StoreLife, STEPS, "lives"))
