"""Answers written in one batch: each is as if written without the others, whichever of them join or leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kvtool.core.errors import KvtoolError
from kvtool.core.model.generate import AnswerSequence, ContinuousBatch, Generated, Sampling, first_token, generate
from tests.fusion.making import NAMES, Case, case, sampling, tokens
from tests.model.test_generate import streamed

LENGTHS = (30, 3, 150, 77)  # tokens of the prompts


def sampling_of(number: int, stop: tuple[str, ...] = ()) -> Sampling:
    """Every other one samples, each with a seed of its own."""
    return replace(sampling(max_tokens=10 + 3 * number, temperature=1.0 * (number % 2), seed=number), stop=stop)


def begun(case_: Case, number: int, on_text: object = None, **more: Any) -> AnswerSequence:
    logits, cache = case_.decoder.prefill(tokens(LENGTHS[number], number))
    wanted = sampling_of(number, **more)
    return AnswerSequence(case_.decoder, cache, [first_token(logits, wanted)], wanted, on_text)  # type: ignore[arg-type]


def alone(case_: Case, number: int, **more: Any) -> Generated:
    logits, cache = case_.decoder.prefill(tokens(LENGTHS[number], number))
    wanted = sampling_of(number, **more)
    return generate(case_.decoder, cache, first_token(logits, wanted), wanted)


def batch_of(*sequences: AnswerSequence) -> ContinuousBatch:
    batch = ContinuousBatch()
    for sequence in sequences:
        batch.add(sequence)
    return batch


def run(batch: ContinuousBatch) -> list[AnswerSequence]:
    """Generate until all answers are done; return them in that order."""
    done: list[AnswerSequence] = []
    while batch.sequences:
        done += batch.step()
    return done


def said(answer: Generated) -> tuple[object, ...]:
    return answer.ids, answer.text, answer.end, answer.stop, answer.steps


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_says_alone(name: str) -> None:
    """The third joins late, and those that are done leave."""
    shared, found = case(name), {}
    sequences = [begun(shared, number) for number in range(3)]
    batch = batch_of(*sequences[:2])
    for number in range(40):
        if number == 4:
            batch.add(sequences[2])
        found |= {sequences.index(sequence): sequence.end() for sequence in batch.step()}
    assert not batch.sequences
    assert {number: said(answer) for number, answer in found.items()} == {
        number: said(alone(shared, number)) for number in range(3)
    }


def test_who_leaves_is_not_missed() -> None:
    shared = case("llama")
    sequences = [begun(shared, number) for number in range(4)]
    batch = batch_of(*sequences)
    batch.step()
    batch.remove(sequences[1])
    rest = [sequences[0], *sequences[2:]]
    assert sorted(map(rest.index, run(batch))) == [0, 1, 2]
    assert [said(sequence.end()) for sequence in rest] == [said(alone(shared, number)) for number in (0, 2, 3)]
    assert len(sequences[1].end().ids) == 2


def test_a_listener_that_fails_ends_its_own_answer_only() -> None:
    shared, heard = case("llama"), list[str]()

    def leave(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 3:
            raise BrokenPipeError("nobody listens")

    sequences = [begun(shared, 0), begun(shared, 2, leave)]
    assert run(batch_of(*sequences)) == sequences[::-1]
    assert len(heard) == 3
    with pytest.raises(BrokenPipeError):
        sequences[1].end()
    assert said(sequences[0].end()) == said(alone(shared, 0))


def test_a_step_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = case("mixtral")
    sequences = [begun(shared, 0), begun(shared, 1)]
    batch = batch_of(*sequences)
    batch.step()
    monkeypatch.setattr(shared.decoder, "extend", Mock(side_effect=KvtoolError("out of memory")))
    assert batch.step() == sequences
    for sequence in sequences:
        with pytest.raises(KvtoolError):
            sequence.end()


def test_an_answer_of_one_token_is_done_at_once() -> None:
    shared = case("llama")
    logits, cache = shared.decoder.prefill(tokens(9, 1))
    wanted = Sampling.greedy(1)
    sequence = AnswerSequence(shared.decoder, cache, [first_token(logits, wanted)], wanted)
    batch = batch_of(sequence)
    assert batch.step() == [sequence]
    assert batch.step() == []
    assert (len(sequence.end().ids), cache.buffers[0].length) == (1, 9)


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("one two three four", ("three",), "one two "),
        ("one two three four", ("four", "o t"), "one tw"),
        ("one two three four", ("none of these",), "one two three four"),
        ("aaab aab", ("aab",), "a"),
        ("words\n\nmore", ("\n\n",), "words"),
        ("첫 방앗간은 1874년에", ("187",), "첫 방앗간은 "),
        ("ends in thr", ("three",), "ends in thr"),
        ("three", ("three",), ""),
        ("all of it", ("", "it"), "all of "),
    ],
)
def test_what_begins_with_a_stop_is_never_shown(text: str, stops: tuple[str, ...], left: str) -> None:
    stream, pieces = streamed(text, stops, stop_repeats=False)
    assert stream.text == "".join(pieces) == left
    assert (stream.stopped_by is None) == (left == text)
    assert text.startswith(left + (stream.stopped_by or ""))


def test_an_answer_ends_with_its_own_stop() -> None:
    shared = case("llama")
    whole = alone(shared, 2)
    stop = whole.text[3:5]
    one, other = begun(shared, 2, stop=(stop,)), begun(shared, 2)
    run(batch_of(one, other))
    cut = one.end()
    assert (cut.text, cut.stop, cut.end) == (whole.text[: whole.text.index(stop)], stop, None)
    assert said(other.end()) == said(whole)


def test_sampling_leaves_the_global_randomness_alone() -> None:
    before = torch.get_rng_state()
    begun(case("llama"), 1)
    assert torch.equal(before, torch.get_rng_state())
