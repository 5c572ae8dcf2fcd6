"""A conversation's next turn from the cache of the last one is what starting over with the same tokens gives.

- Where a mode recomputes everything: full prefill of all tokens, by plain `transformers`.
- Where rows are chosen chunk by chunk (nothing, link tokens): one pass over the same plan in one go, in which the
earlier questions and answers are between the chunks and are computed in place.
- In every mode: the same turns fused anew, with the answers given instead of generated.
"""

from __future__ import annotations

import pytest
import torch

from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Candidate, as_resident, build_plan, extend_plan
from kvtool.core.fusion.prefix_cache import StoredPrefix, extend_prefix, fuse_prefix
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Sampling, first_token, generate
from kvtool.core.model.hf.states import StateCache
from tests.fusion.making import (
    BOS,
    CHUNKS,
    IDLE,
    LOSSLESS,
    NAMES,
    PREFIX,
    QUESTION,
    Case,
    Ids,
    assert_full,
    case,
    distance,
    plain_logits,
    plain_text,
    tokens,
)
from tests.fusion.test_prefix_cache import GOES_ON, Shelf, decoder, plan_of

HEADER: Ids = tokens(5, 80)  # what a template has between two turns
TURNS = ((CHUNKS[:2], QUESTION), ((), tokens(6, 81)), (CHUNKS[2:], tokens(9, 82)))  # one brings no new chunk
SAID, CHECKED = 5, 8  # tokens of an answer


def talked(one: Case, selector: Selector, answers: list[Ids] | None = None) -> tuple[Fused, list[Ids]]:
    """All turns, answered but for the last; `answers`: appended instead of generated."""
    decoder, said = one.decoder, []
    (chunks, question), *later = TURNS
    fused = one.fuse(one.plan(chunks, lead_in=BOS, question=question), selector, reserve=20)
    for number, (chunks, question) in enumerate(later):
        if answers is None:
            sampling = Sampling.greedy(SAID)
            ids = generate(decoder, fused.cache, first_token(fused.logits, sampling), sampling).ids
            computed = fused.cache.buffers[0].length - fused.plan.length
        else:
            ids, computed = answers[number], 0
        said.append(ids)
        behind = (*ids, *HEADER)
        decoder.append(behind[computed:], fused.cache)
        wanted = [one.candidate(chunk, BOS) for chunk in chunks]
        plan = extend_plan(as_resident(fused.plan.segments, behind), wanted, question)
        now = fuse(decoder, plan, selector, one.source, reserve=20, cache=fused.cache)
        counts = now.tokens
        assert counts.resident == fused.plan.length + len(behind)
        assert counts.prompt == counts.resident + counts.reused + counts.recomputed + counts.fresh
        assert max(counts.rows) <= counts.prompt - counts.resident
        fused = now
    return fused, said


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "float32") for name in NAMES), ("llama", "bfloat16"), ("gemma3", "bfloat16")]
)
def test_recompute_everything_is_full_prefill_of_all_turns(family: str, dtype: str) -> None:
    """And the answer continues token by token as plain `transformers` would."""
    one = case(family, dtype)
    for name in LOSSLESS if family == "llama" else ("full", "union"):
        fused, _ = talked(one, LOSSLESS[name])
        assert_full(one, fused.plan.text_ids, fused.logits)
    if dtype == "float32":
        assert goes_on(one.decoder, fused) == plain_text(family, dtype, tuple(fused.plan.text_ids), CHECKED)


def goes_on(decoder: Decoder, fused: Fused) -> Ids:
    sampling = Sampling.greedy(CHECKED)
    return generate(decoder, fused.cache, first_token(fused.logits, sampling), sampling).ids


@pytest.mark.parametrize("family", GOES_ON)
def test_a_model_that_keeps_states_goes_on_exactly(family: str) -> None:
    """Also where a question was begun after the states, and given up."""
    one = decoder(family)
    fused = fuse_prefix(one, plan_of(), Full(), StoredPrefix((), ()), Shelf().read, reserve=20).fused
    greedy, cache = Sampling.greedy(SAID), fused.cache
    said = generate(one, cache, first_token(fused.logits, greedy), greedy).ids
    assert isinstance(cache, StateCache)
    computed = cache.buffers[0].length - fused.plan.length
    one.append((*said[computed:], *HEADER), cache)
    cache.mark()
    stands = as_resident(fused.plan.segments, (*said, *HEADER))
    for question in (QUESTION, TURNS[-1][1]):
        cache.set_length(len(stands.ids))
        plan = extend_plan(stands, [Candidate(CHUNKS[0], reason="not stored")], question)
        later = extend_prefix(one, cache, plan, Full(), reserve=20).fused
        assert later.tokens.resident == len(stands.ids)
        assert later.tokens.fresh == len(CHUNKS[0]) + len(question)
        expected = plain_logits(family, "float32", tuple(plan.text_ids), "sdpa")
        assert distance(later.logits, expected) <= 1e-4
        assert goes_on(one, later) == plain_text(family, "float32", tuple(plan.text_ids), CHECKED)


@pytest.mark.parametrize("family", NAMES)
def test_rows_chosen_chunk_by_chunk_are_those_of_one_pass(family: str) -> None:
    one = case(family)
    for selector in (IDLE["reuse"], Epic(3)):
        fused, said = talked(one, selector)
        between: list[Candidate] = []
        for number, (chunks, question) in enumerate(TURNS):
            between += [one.candidate(chunk, BOS) for chunk in chunks]
            if number < len(said):
                between.append(Candidate((*question, *said[number], *HEADER), reason="a turn"))
        plan = build_plan(one.candidate(PREFIX, ()), between, TURNS[-1][1])
        assert plan.text_ids == fused.plan.text_ids
        whole = fuse(one.decoder, plan, selector, one.source)
        assert distance(fused.logits, whole.logits) <= 1e-4
        assert whole.tokens.recomputed >= fused.tokens.recomputed


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_every_mode_starts_over_to_the_same(name: str, family: str) -> None:
    selector = SELECTORS[name]()
    fused, said = talked(case(family), selector)
    anew, _ = talked(case(family), selector, said)
    assert distance(fused.logits, anew.logits) <= 1e-4
    assert torch.equal(fused.recomputed, anew.recomputed)


@pytest.mark.parametrize("name", IDLE)
def test_a_dropped_turn_is_caught(name: str) -> None:
    fused, said = talked(case("llama"), IDLE[name])
    other, _ = talked(case("llama"), IDLE[name], [tokens(SAID, 90), *said[1:]])
    assert distance(fused.logits, other.logits) > 1e-2
