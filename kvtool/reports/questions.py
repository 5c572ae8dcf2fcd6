"""Questions of an evaluation: answered in full and by each run, and generated from the store's chunks.

A run is a fusion mode with how much it recomputes, such as `union:5%`; its distance to the full answer is measured.
Generated questions favour retrieval, since they use the words of the passage, and the model, since it wrote the answers
from only that passage. They serve to compare modes on one's own documents.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.core.common.text import counted
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.evaluate.measures import Row, normalise, run_name, score
from kvtool.core.evaluate.reference import SAME, Distance, Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors import REFERENCE, SELECTORS, parameters_of_mode
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Generated, Sampling, first_token, generate
from kvtool.core.model.prompt import chunk_tokens, prompt_parts, question_tokens
from kvtool.core.model.tokens import encode
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import PromptLayout, lay_out
from kvtool.core.query.reply import NO_KV, Request
from kvtool.core.retrieval.passages import Passage, passages_in
from kvtool.core.retrieval.terms import asked_terms, terms
from kvtool.reports.evaluation import RowsOf, name_of
from kvtool.reports.summary import retrieval_recall

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.types import Warn
    from kvtool.core.session.session import Session


_HINT = "a run is MODE or MODE:AMOUNT, such as reuse, epic:16, blend:0.15 or union:5%; MODE+OPTION=VALUE changes a mode"


@dataclass(frozen=True, slots=True)
class RunSpec:
    mode: str
    knob: str = ""  # the option that `amount` sets, such as `ratio`; "" if the mode has none
    amount: float | None = None
    changes: tuple[tuple[str, Any], ...] = ()  # other options of the mode and their values, by name

    @property
    def name(self) -> str:
        return run_name(self.mode, self.changes, self.amount)

    def options(self, base: QueryOptions) -> QueryOptions:
        own = options_of(QueryOptions)
        changed = {name: value for name, value in self.changes if name in own}
        if self.amount is not None:
            changed[self.knob] = self.amount
        of_mode = (f"{self.mode}.{name}={value}" for name, value in self.changes if name not in own)
        return replace(base, fusion=self.mode, set=(*base.set, *of_mode), **changed)


def parse_runs(texts: Iterable[str] = ()) -> list[RunSpec]:
    """Read runs, in the order given and each once; commas separate, too. The reference always runs, and is left out.

    Nothing given: every mode with its defaults, except those that give what full prefill does. Raises UsageError.
    """
    given = list(texts)
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if given and not words:
        raise UsageError("--runs names no run", _HINT)
    runs = dict.fromkeys(map(parse_run, words or (mode for mode, kind in SELECTORS.items() if not kind.lossless)))
    return [run for run in runs if run.mode != REFERENCE]


def parse_run(text: str) -> RunSpec:
    """Read `mode` or `mode:amount`; `mode+option=value` changes an option. Raises UsageError."""
    variant, colon, amount = (part.strip() for part in text.partition(":"))
    mode, *changes = (part.strip() for part in variant.split("+"))
    if mode not in SELECTORS:
        raise UsageError(
            f"run {text!r}: there is no fusion mode {mode!r}",
            did_you_mean(mode, SELECTORS) or f"known: {', '.join(SELECTORS)}; {_HINT}",
        )
    knob = options_of(QueryOptions)[name] if (name := SELECTORS[mode].knob) else None
    changed = tuple(sorted(_change(mode, change, f"run {text!r}") for change in changes))
    if knob is None and colon:
        raise UsageError(f"run {text!r}: {mode} takes no amount", f"write {variant}")
    if knob is None:
        return RunSpec(mode, changes=changed)
    return RunSpec(mode, knob.name, knob.parse(amount, f"run {text!r}") if colon else knob.default, changed)


def _change(mode: str, text: str, where: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    known = {each: option for each, option in parameters_of_mode(mode).items() if each != SELECTORS[mode].knob}
    if name not in known:
        hint = did_you_mean(name, known) or (f"known: {', '.join(known)}" if known else "leave it out")
        raise UsageError(f"{where}: {mode} has no option {name!r}", hint)
    return name, options_of(QueryOptions).get(name, known[name]).parse(value, where)


# ---- one question ----


def paired_rows(session: Session, specs: Mapping[str, RunSpec], options: QueryOptions, warn: Warn) -> RowsOf:
    decoder, source = session.decoder, session.source

    def rows_of(request: Request, names: Sequence[str]) -> Mapping[str, Row]:
        paired = PairedRun(decoder, source, lay_out(session, request, options), options)
        rows = dict(paired.rows([specs[name] for name in names]))
        rows[REFERENCE] = {**rows[REFERENCE], **retrieval_recall(session.finder.places, paired.asked)}
        holes = max((row["holes"] for row in rows.values()), key=len)
        if holes:
            cure = "`kvtool ingest` computes their KV" if holes[0] == NO_KV else "see `kvtool store verify`"
            warn(
                f"{name_of(request)}: {counted(len(holes), 'chunk')} computed in place: {holes[0]}",
                f"{cure}; its results say little about reuse",
            )
        return rows

    return rows_of


@dataclass(frozen=True, slots=True)
class PairedRun:
    """Runs of one question, its prompt laid out; answers are greedy, of at most `options.max_tokens`."""

    decoder: Decoder
    source: KVSource
    asked: PromptLayout
    options: QueryOptions

    def rows(self, specs: Sequence[RunSpec]) -> Iterator[tuple[str, Row]]:
        fused, full_ms = self._fuse(RunSpec(REFERENCE))
        reference = Reference.answered(self.decoder, fused, self.options.max_tokens)
        row = self._row(fused, full_ms, full_ms, reference.answer, reference.answer, SAME)
        del fused
        yield REFERENCE, row
        for spec in specs:
            fused, milliseconds = self._fuse(spec)
            forced = reference.force(fused)
            answer = forced.answer(self.options.max_tokens)
            yield spec.name, self._row(fused, milliseconds, full_ms, answer, reference.answer, forced.distance)

    def _fuse(self, spec: RunSpec) -> tuple[Fused, float]:
        """Fuse, and time it in ms: from the question's text to the first token's id."""
        selector = selector_for(spec.options(self.options), spec.mode)
        started = time.perf_counter()
        fused = fuse(self.decoder, self.asked.plan, selector, self.source, reserve=self.options.max_tokens)
        fused.logits.argmax().item()
        return fused, self.asked.retrieve_ms + (time.perf_counter() - started) * 1e3

    def _row(
        self, fused: Fused, ttft_ms: float, full_ms: float, answer: Generated, full: Generated, distance: Distance
    ) -> Row:
        text, counts, gold = answer.text.strip(), fused.tokens, self.asked.request.answers
        return {
            "answer": text,
            "answer_equal": answer.ids == full.ids,
            "ttft_ms": ttft_ms,
            "speedup": full_ms / ttft_ms,  # to the full recompute of the same process
            "reused": counts.reused,
            "recomputed": counts.recomputed,
            "fresh": counts.fresh,
            "bytes_read": fused.bytes_read,
            "levels": fused.plan.levels,
            "holes": [one.reason for one in fused.plan.segments[:-1] if one.status == "miss" and one.ids],
            **(score(text, gold) if gold else {}),
            **distance.to_json(),
        }


TRIES = 4  # passages that are read for each question wanted, at most
_SYSTEM = "You write questions about passages, in the language of the passage."
# Small models follow examples sooner than instructions: of fourteen passages SmolLM2-135M made a question of none when
# it was asked for one, and of all fourteen after these.
_SHOWN = """Write one question about each passage. The passage holds the answer.

Passage: The mill at Hartow was built in 1702 by Anna Reeve, who came from Brennick with two mules.
Question: Who built the mill at Hartow?

Passage: On market days the ferry of Olm leaves every twenty minutes; the fare has been four pence since 1911.
Question: How often does the ferry of Olm leave on market days?

Passage: {passage}
Question:"""
_BEGUN = "Question:"
_SHORTEST = 120  # characters of a passage worth asking about
_QUESTION_TOKENS, _ANSWER_TOKENS = 48, 20
_ANSWER_WORDS = 12
_ENDS = "?？؟"
_ABOUT = 0.5  # of a question's search terms occur in its passage, and two of them at least


def generate_questions(session: Session, count: int) -> Iterator[Request | None]:
    """Write up to `count` questions, of as many documents as possible; None for a passage without a question."""
    made, asked = 0, set[str]()
    for passage, text in _worth_asking(session.store, count * TRIES):
        if made == count:
            return
        question = _question_about(session, text)
        if question is None or question in asked:
            yield None
            continue
        asked.add(question)
        made += 1
        answer = _answer(session, question, text)
        yield Request(
            question,
            answers=(answer,) if _is_answer(question, answer, text) else (),
            sources=(passage.source,),
            generator=session.identity.model,
        )


def _question_about(session: Session, text: str) -> str | None:
    tokenizer = session.tokenizer
    parts = prompt_parts(tokenizer, _SYSTEM)
    wish = encode(tokenizer, _SHOWN.format(passage=" ".join(text.split())))
    said = _said(session, (parts.prefix, wish, parts.answer_header, encode(tokenizer, _BEGUN)), _QUESTION_TOKENS)
    question = _first_question(said.text)
    return question if question is not None and _is_about(question, text) else None


def _answer(session: Session, question: str, text: str) -> str:
    parts, tokenizer = session.parts, session.tokenizer
    pieces = (parts.prefix, *chunk_tokens(tokenizer, [text]), question_tokens(tokenizer, question, parts))
    said = _said(session, pieces, _ANSWER_TOKENS)
    return said.text.strip() if said.finish == "stop" else ""


def _said(session: Session, pieces: Sequence[Sequence[int]], most: int) -> Generated:
    ids = [token for piece in pieces for token in piece]
    session.decoder.check_length(len(ids) + most, "the store's chunks are too long for questions about them")
    logits, cache = session.decoder.prefill(ids, reserve=most)
    sampling = Sampling.greedy(most)
    return generate(session.decoder, cache, first_token(logits, sampling), sampling)


def _first_question(said: str) -> str | None:
    line = next((line for line in said.splitlines() if line.strip()), "")
    ends = [at for at in map(line.find, _ENDS) if at >= 0]
    return line[: min(ends) + 1].strip(" \"'*") if ends else None


def _is_about(question: str, text: str) -> bool:
    wanted, there = set(asked_terms(question)), set(itertools.chain(*terms(text)))
    return sum(not there.isdisjoint(forms) for forms in wanted) >= max(2, _ABOUT * len(wanted))


def _is_answer(question: str, answer: str, text: str) -> bool:
    wanted = normalise(answer)
    short = 0 < len(wanted.split()) <= _ANSWER_WORDS
    return short and wanted in normalise(text) and wanted not in normalise(question)


def _worth_asking(store: Store, most: int) -> Iterator[tuple[Passage, str]]:
    dice = random.Random(0)
    sources = sorted(store.sources())
    dice.shuffle(sources)
    left = {source: order for source in sources if (order := _long_passages(store, source, dice))}
    while left and most > 0:
        for source in list(left):
            passage, text = left[source].pop()
            if not left[source]:
                del left[source]
            yield passage, text
            most -= 1
            if not most:
                return


def _long_passages(store: Store, source: str, dice: random.Random) -> list[tuple[Passage, str]]:
    document = store.document(source)
    if document is None:
        return []
    texts = [(passage, document.text[passage.start : passage.end]) for passage in passages_in(document)]
    long = [(passage, text) for passage, text in texts if len(text.strip()) >= _SHORTEST]
    dice.shuffle(long)
    return long
