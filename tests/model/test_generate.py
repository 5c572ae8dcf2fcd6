"""Answers: those of `transformers`' own `generate`, streamed, ended and repeatable; those that repeat themselves end
there, while lists, tables, code, numbers and refrains go on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kvtool.core.errors import ModelError, UsageError
from kvtool.core.evaluate.reference import forced_logits
from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.model.generate import (
    Generated,
    Sampling,
    adjusted,
    first_token,
    generate,
    greedy_prefix,
    likely,
    next_token,
    nucleus,
    stop_ids,
)
from kvtool.core.model.options import SamplingOptions
from kvtool.core.model.tokens import TextStream, encode
from tests.families import tiny_model
from tests.fusion.making import BOS, NAMES, Case, case, decoder_of, plain_model, sampling, tokenizer
from tests.wording import refused

BELL = "The bell was cast in 1884, and it hangs in the tower of Corvane."
PROUD = "They are proud of their place in the world"
KOREAN = "천문대는 언덕 위에 서 있으며 해마다 많은 사람이 그곳을 찾아옵니다."
JAPANESE = "天文台は丘の上に立っていて毎年多くの人がそこを訪れます。"


def streamed(
    text: str | list[int], stops: Sequence[str] = (), stop_repeats: bool = True, ends: frozenset[int] = frozenset()
) -> tuple[TextStream, list[str]]:
    """Say a text, or tokens, token by token, as long as it is not ended."""
    pieces: list[str] = []
    stream = TextStream(tokenizer(), {*ends}, pieces.append, stops, stop_repeats)
    for token in encode(tokenizer(), text) if isinstance(text, str) else text:
        if stream.ended:
            break
        stream.add(token)
    stream.end()
    return stream, pieces


@pytest.mark.parametrize(
    ("begin", "said_again"),
    [
        ("It is old. " + BELL, " " + BELL),
        (BELL, "\n\n" + BELL),
        (f"{BELL} It is rung at noon.", f" {BELL} It is rung at noon."),  # two sentences, after each other
        ("The Harrowdene Bell Foundry", "\n\nThe Harrowdene Bell Foundry"),
        (f"{PROUD}, and {PROUD},", f" and {PROUD},"),
        ("It was 3 weeks, 22 seconds, 1 minute,", " 22 seconds, 1 minute,"),
        (KOREAN, " " + KOREAN),
        (JAPANESE, JAPANESE),
        ("```\nrun()\n```\n" + BELL, " " + BELL),
    ],
)
def test_a_loop_ends_before_it_repeats(begin: str, said_again: str) -> None:
    """Greedy decoding would repeat its last words until `--max-tokens`."""
    stream, pieces = streamed(begin + said_again * 20)
    assert stream.repeated
    assert stream.text.strip() == begin
    assert "".join(pieces) == stream.text  # what was shown is the answer, and nothing of it is taken back
    assert tokenizer().decode(stream.ids).strip() == begin
    assert streamed(begin + said_again * 20, stop_repeats=False)[0].text == begin + said_again * 20


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- a\n- a\n- a\n- a\n- b\n",
        "Yes. Yes. Yes, it does. No. No.",
        "Ha ha ha ha ha ha, ha ha ha, ha ha ha!",
        "1000000000000000000000000000000000000000000000000000000",
        "0, " * 60 + "1",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| | | |\n| | | |\n| | | |\n| | | |\n| | | |\n",
        f"- Anna: {BELL}\n- Berta: {BELL}\n- Clara: {BELL}\n",
        "I went down to the crossroads, fell down on my knees\n" * 2 + "Asked the Lord above for mercy",
        "London Bridge is falling down,\nFalling down, falling down.\nLondon Bridge is falling down,\nMy fair lady.",
        "```python\nclass A:\n    def f(self):\n        raise NotImplementedError\n\n    def g(self):\n"
        "        raise NotImplementedError\n\n    def h(self):\n        raise NotImplementedError\n```\n",
        "```\nPlease wait for the machine.\nPlease wait for the machine.\nDone.\n```",
        "천천히 천천히 천천히 걸어갔다. 그리고 천천히, 아주 천천히 돌아왔다.",
    ],
)
def test_repetition_for_a_reason_goes_on(text: str) -> None:
    stream, pieces = streamed(text)
    assert not stream.repeated
    assert stream.text == text == "".join(pieces)


def test_little_is_held_back() -> None:
    """A reader waits for a word or two where a sentence begins as one did before."""
    pieces: list[str] = []
    stream = TextStream(tokenizer(), set(), pieces.append, stop_repeats=True)
    text = "The mill stands at the river. The mill is old. The bell hangs in the tower. The bell rings at noon."
    held = []
    for token in encode(tokenizer(), text):
        stream.add(token)
        held.append(len(stream.text) - len("".join(pieces)))
    assert max(held) <= len("The mill s")
    assert sum(held) / len(held) < 2


GREEDY = Sampling.greedy(16)


def answer(case_: Case, fused: Fused, sampling: Sampling, on_text: Any = None) -> Generated:
    first = first_token(fused.logits, sampling)
    return generate(case_.decoder, fused.cache, first, sampling, on_text)


def by_hand(case_: Case, fused: Fused, count: int) -> tuple[int, ...]:
    """Greedy, token by token, over a fused cache; the end token excluded."""
    ids, logits = [], fused.logits
    while len(ids) < count and int(logits.argmax()) not in stop_ids(case_.decoder):
        ids.append(int(logits.argmax()))
        logits = case_.decoder.extend(ids[-1:], fused.cache)[-1]
    return tuple(ids)


@pytest.mark.parametrize("reserve", [0, 16])
@pytest.mark.parametrize("name", NAMES)
def test_after_reuse_it_continues_the_fused_cache(name: str, reserve: int) -> None:
    shared = case(name)
    plan = shared.plan(lead_in=BOS)
    found = answer(shared, shared.fuse(plan, Reuse(), reserve=reserve), GREEDY)
    assert found.ids == by_hand(shared, shared.fuse(plan, Reuse()), 16)


def test_a_checkpoints_habits_do_not_change_the_answer() -> None:
    """Qwen2.5 asks for a repetition penalty, Llama for sampling: kvtool decides how tokens are chosen."""
    model = tiny_model("qwen2")
    model.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=1.9, temperature=0.6, top_k=3, no_repeat_ngram_size=1, eos_token_id=[1, 7]
    )
    own = Case("qwen2", "float32", decoder_of(model))
    plan = own.plan(lead_in=BOS)
    assert stop_ids(own.decoder) == {1, 7}
    found = answer(own, own.fuse(plan, Reuse()), GREEDY)
    assert found.ids == by_hand(own, own.fuse(plan, Reuse()), 16)


@pytest.mark.parametrize(
    "text", ["plain words", "첫 방앗간은 1874년에", "🙂🙃 naïve — 東京", "ends with é", "\n\n two  spaces"]
)
def test_pieces_join_to_the_text(text: str) -> None:
    stream, pieces = streamed(text)
    assert stream.text == text == "".join(pieces)
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    if text.isascii():
        assert len(pieces) == len(stream.ids)


def test_a_character_that_is_never_finished_is_left_out() -> None:
    ids = encode(tokenizer(), "ok 🙂")[:-1]
    stream, pieces = streamed(ids)
    assert stream.text == "".join(pieces) == "ok "
    assert stream.ids == ids


@pytest.mark.parametrize("seed", range(4))
def test_a_long_answers_text_is_that_of_all_its_tokens(seed: int) -> None:
    """Random tokens: parts of characters and invalid bytes occur anywhere."""
    chance = random.Random(seed)
    ids = [chance.randrange(5, 512) for _ in range(300)] + encode(tokenizer(), "강가의 첫 방앗간은 river ") * 8
    stream, pieces = streamed(ids, stop_repeats=False)
    assert stream.text == "".join(pieces) == tokenizer().decode(ids, skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.parametrize("text", ["two words", ""])
def test_an_end_token_ends_it(text: str) -> None:
    ids = encode(tokenizer(), text)
    stream, pieces = streamed([*ids, 1, *ids, 40], ends=frozenset({1}))
    assert (stream.text, stream.ids, stream.ended_by) == (text, ids, 1)
    assert "".join(pieces) == text


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_more_than_max_tokens(count: int) -> None:
    shared = case("llama")
    found = answer(shared, shared.fuse(shared.plan(lead_in=BOS), Reuse()), Sampling.greedy(count))
    assert found.ids == by_hand(shared, shared.fuse(shared.plan(lead_in=BOS), Reuse()), count)
    assert (len(found.ids), found.finish) == (count, "length")


@pytest.mark.parametrize("most", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3"])
def test_a_beginning_goes_on_as_if_it_had_not_been_looked_at(name: str, most: int) -> None:
    shared = case(name)
    plan = shared.plan(lead_in=BOS)
    whole = answer(shared, shared.fuse(plan, Reuse(), reserve=40), Sampling.greedy(40))
    fused = shared.fuse(plan, Reuse(), reserve=40)
    begun = greedy_prefix(shared.decoder, fused.cache, fused.logits, most)
    assert begun.ids == whole.script[:most]
    pieces: list[str] = []
    first, *more = begun.ids
    found = generate(shared.decoder, fused.cache, first, Sampling.greedy(40), pieces.append, more)
    assert (found.text, found.ids, found.end) == (whole.text, whole.ids, whole.end)
    assert "".join(pieces) == whole.text


def test_a_beginning_knows_its_probabilities() -> None:
    shared = case("llama")
    plan = shared.plan(lead_in=BOS)
    fused = shared.fuse(plan, Reuse())
    begun = greedy_prefix(shared.decoder, fused.cache, fused.logits, 6)
    logits = forced_logits(shared.decoder, shared.fuse(plan, Reuse()), begun.ids).double().log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logits, begun.ids, strict=True)]
    assert begun.log_p == pytest.approx(expected, abs=1e-4)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SELECTORS)
def test_seeded_sampling_is_repeatable(name: str) -> None:
    shared = case("llama")
    plan = shared.plan(lead_in=BOS)

    def sampled(seed: int) -> tuple[int, ...]:
        torch.rand(3)  # the global random state is somewhere else each time
        fused = shared.fuse(plan, SELECTORS[name]())
        return answer(shared, fused, sampling(max_tokens=12, temperature=1.0, seed=seed)).ids

    with torch.random.fork_rng(devices=[]):
        first = [sampled(seed) for seed in range(4)]
        assert first == [sampled(seed) for seed in range(4)]
        assert len(set(first)) > 1


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_after_full_prefill_it_samples_what_transformers_samples(temperature: float) -> None:
    shared = case("llama")
    plan = shared.plan(lead_in=BOS)
    prompt = torch.tensor([plan.ids])
    with torch.random.fork_rng(devices=[]):
        seeded = sampling(max_tokens=12, temperature=temperature, seed=3)
        found = answer(shared, shared.fuse(plan, Full(), reserve=12), seeded)
        torch.manual_seed(3)
        expected = plain_model("llama", "float32").generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12},
        )
    assert list(found.script) == expected[0, prompt.shape[1] :].tolist()


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    logits = torch.tensor([40.0, 39.0, 42.0, -torch.inf])
    for temperature in (1e-9, 1e-45, 1e-300):
        assert first_token(logits, sampling(temperature=temperature)) == 2
    assert first_token(torch.tensor([1e38, 3e38, -3e38]), sampling(temperature=1e-5)) == 1  # divided, they overflow


def test_numbers_that_are_not_finite_are_no_answer() -> None:
    """Rows that overflowed when they were stored are whole by their digests."""
    for wrong in (float("nan"), float("inf")):
        logits = torch.zeros(9, dtype=torch.float32)
        logits[4] = wrong
        for choose in (first_token, next_token):  # later ones can overflow, too
            with refused(ModelError):
                choose(logits, sampling())
    logits[4], logits[2] = float("-inf"), 1.0  # a token that the model rules out
    assert first_token(logits, sampling()) == 2
    with pytest.raises(ModelError):
        first_token(torch.full((9,), float("-inf")), sampling())


def test_biases_and_penalties_are_those_of_the_equation() -> None:
    logits, bias = torch.tensor([1.0, 0.5, 0.25, 0.0]), {3: 0.75, 1: -4.0}
    biases = [f"{token}={number}" for token, number in bias.items()]
    state = sampling(frequency_penalty=0.3, presence_penalty=0.4, logit_bias=biases)
    counts = [0] * 4
    for choose in (first_token, *[next_token] * 11):
        wanted = [
            float(logits[j]) + bias.get(j, 0.0) - counts[j] * 0.3 - (counts[j] > 0) * 0.4 for j in range(len(logits))
        ]
        assert adjusted(logits, state).tolist() == pytest.approx(wanted)
        token = choose(logits, state)
        assert token == max(range(4), key=lambda j: wanted[j])
        counts[token] += 1
    assert min(counts[0], counts[2], counts[3]) > 0
    first_token(logits, state)  # of another answer, which begins anew
    assert len(state.said) == 1
    assert logits.tolist() == [1.0, 0.5, 0.25, 0.0]


def test_a_repetition_penalty_counts_the_last_tokens_of_the_answer() -> None:
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5])
    for last, wanted in ((-1, [1.0, -2.0, 1.0, 0.5]), (1, [2.0, -2.0, 1.0, 0.5]), (0, [2.0, -1.0, 1.0, 0.5])):
        state = sampling(repetition_penalty=2.0, repeat_last_n=last)
        state.said.extend([0, 1])
        assert adjusted(logits, state).tolist() == pytest.approx(wanted)
        assert not state.options.is_greedy
    assert logits.tolist() == [2.0, -1.0, 1.0, 0.5]


def test_no_end_is_chosen_before_the_minimum_length() -> None:
    logits, state = torch.tensor([0.0, 9.0, 1.0]), Sampling(SamplingOptions(min_tokens=2), ends=(1,))
    assert [first_token(logits, state), *(next_token(logits, state) for _ in range(2))] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"sampled_tokens": 2}, [1, 3]),
        ({"sampled_tokens": 9}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"sampled_tokens": 3, "top_p": 0.77}, [1, 3]),  # of the chances of three tokens
    ],
)
def test_unlikely_tokens_are_not_drawn(options: dict[str, Any], kept: list[int]) -> None:
    chances = likely(torch.tensor([0.05, 0.45, 0.2, 0.3]), SamplingOptions(temperature=1.0, **options))
    assert chances.nonzero().flatten().tolist() == kept


def test_a_bias_of_no_token_is_refused() -> None:
    with refused(UsageError, numbers=True):
        next_token(torch.zeros(4), sampling(logit_bias="4=1"))


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_top_p_keeps_the_fewest_tokens_that_are_enough(top_p: float) -> None:
    chances = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    kept, total = set[int](), 0.0
    for token in sorted(range(5), key=lambda j: -float(chances[j])):
        if kept and total >= top_p - 1e-6:
            break
        kept.add(token)
        total += float(chances[token])
    assert {*nucleus(chances, top_p).nonzero()[:, 0].tolist()} == kept
    logits = chances.log()
    drawn = {first_token(logits, sampling(temperature=1.0, top_p=top_p, seed=seed)) for seed in range(400)}
    assert drawn == kept


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    state = sampling(top_logprobs=2, logit_bias="0=9", presence_penalty=1.0)
    assert first_token(logits, state) == next_token(logits, state) == 0
    wanted = logits.double().softmax(0).log().tolist()
    for (token, log_p), best in state.noted:
        assert token == 0
        assert log_p == pytest.approx(wanted[0])
        assert [one for one, _ in best] == [1, 2]
        assert [one for _, one in best] == pytest.approx([wanted[1], wanted[2]])
    assert len(state.noted) == 2
