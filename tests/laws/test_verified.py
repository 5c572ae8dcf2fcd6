"""A verified answer is full prefill's, whatever the draft: tokens, end, log-probabilities and rows, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.generate import Generated, Sampling, first_token, follow, generate
from tests.fusion.making import BOS, IDLE, Case, sampling, tokens
from tests.fusion.making import case as shared_case

TOKENS = 19  # of an answer: more than one step in machine code takes


def said(case: Case, fused: Fused, sampling: Sampling, draft: Sequence[int] | None = None) -> Generated:
    """Answer as `--fusion full` does, or with the tokens of a draft followed first."""
    decoder, cache = case.decoder, fused.cache
    if draft is None:
        return generate(decoder, cache, first_token(fused.logits, sampling), sampling)
    first, *more = follow(decoder, cache, fused.logits, draft, sampling)
    assert cache.buffers[0].length == fused.plan.length + len(more)
    return generate(decoder, cache, first, sampling, more=more)


def facts(answer: Generated, sampling: Sampling) -> tuple[object, ...]:
    return answer.ids, answer.end, answer.finish, answer.text, list(sampling.noted)


def rows(fused: Fused) -> list[torch.Tensor]:
    return [side.clone() for buffer in fused.cache.buffers for side in buffer.view()]


def holds(case: Case, sampling: Sampling, *more: Sequence[int]) -> Generated:
    """Check drafts of several kinds, what the reused cache says among them; return full prefill's answer."""
    plan = case.plan(lead_in=BOS)
    full = case.fuse(plan, Full(), reserve=TOKENS)
    answer = said(case, full, sampling)
    expected, kept = facts(answer, sampling), rows(full)
    fused = case.fuse(plan, IDLE["reuse"], reserve=TOKENS)
    drafted, ids = said(case, fused, sampling), answer.ids
    wrong = [(token + 1) % 40 + 5 for token in ids]
    drafts = (drafted.script, answer.script, (*ids[:17], *wrong[17:]), *more)
    for draft in drafts:
        exact = fuse(case.decoder, plan, Full(), case.source, cache=fused.cache)  # over what the draft has left
        found = said(case, exact, sampling, draft)
        assert facts(found, sampling) == expected, draft
        assert all(torch.equal(*pair) for pair in zip(rows(exact), kept, strict=True)), draft
    return answer


def test_whatever_the_draft_was(case: Case) -> None:
    holds(case, sampling(max_tokens=TOKENS, top_logprobs=2))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v2"])
def test_an_end_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full prefill ends where the draft goes on, and goes on where the draft ends."""
    case = shared_case(name)
    plain = said(case, case.fuse(case.plan(lead_in=BOS), Full(), reserve=TOKENS), Sampling.greedy(TOKENS)).ids
    end = next(token for at, token in enumerate(plain) if at >= 5 and token not in plain[:at])
    monkeypatch.setattr(case.decoder.model.generation_config, "eos_token_id", [1, end])
    at = plain.index(end)
    longer, shorter = (*plain[:at], *tokens(6, 90)), (*plain[: at - 2], end)
    answer = holds(case, Sampling.greedy(TOKENS), longer, shorter, plain[:1], (), tokens(TOKENS, 92))
    assert (answer.ids, answer.end, answer.finish) == (plain[:at], end, "stop")


@pytest.mark.parametrize("most", [1, 2, 17])
def test_a_cut(most: int) -> None:
    answer = holds(shared_case("qwen3"), sampling(max_tokens=most, frequency_penalty=1.5), tokens(most, 91))
    assert len(answer.ids) == most
