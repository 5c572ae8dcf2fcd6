"""Question generation: the model writes questions from the store's chunks, for a first evaluation.

Such questions favour retrieval, since they use the words of the passage, and the model, since it wrote the answers from
only that passage. They serve to compare modes on one's own documents.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvtool.core.evaluate.measures import normalise
from kvtool.core.model.generate import Generated, Sampling, first_token, generate
from kvtool.core.model.prompt import chunk_tokens, prompt_parts, question_tokens
from kvtool.core.model.tokens import encode
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.passages import Passage, passages_in
from kvtool.core.retrieval.terms import asked_terms, terms

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.session import Session

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
