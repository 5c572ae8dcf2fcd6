"""Runs of a question: their names, and answers and distances equal to those of generation from scratch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from transformers import DynamicCache

from kvtool.core.errors import UsageError
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.model.generate import Generated, Sampling, first_token, generate
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import PromptLayout
from kvtool.core.query.reply import Request
from kvtool.reports.questions import PairedRun, RunSpec, parse_run, parse_runs
from tests.fusion.making import CHUNKS, NAMES, Case, case, new_case, plain_text, tokens
from tests.reports.plain import past_of, run_plain
from tests.wording import refused


def names(*texts: str) -> list[str]:
    return [run.name for run in parse_runs(texts)]


def test_nothing_given_is_every_mode_by_default() -> None:
    assert names()[:3] == ["reuse", "epic:16", "blend:0.15"]
    lossy = [name for name, kind in SELECTORS.items() if not kind.lossless]
    assert [name.partition(":")[0] for name in names()] == lossy


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("reuse", "reuse"), ("epic", "epic:16"), ("epic:0", "epic:0"), ("epic:016", "epic:16")),
        *(("blend", "blend:0.15"), (" blend : 0.150 ", "blend:0.15"), ("blend:15%", "blend:0.15")),
        *(("union:7%", "union:0.07"), ("infoflow:1", "infoflow:1")),
        ("union+shift=no:15%", "union+shift=no:0.15"),
        ("union + shift=off", "union+shift=no:0.15"),
        ("union+weighting=0.50+shift=yes:5%", "union+shift=yes+weighting=0.5:0.05"),
        ("blend+metric=k_l1", "blend+metric=k_l1:0.15"),
    ],
)
def test_a_run_has_one_name(text: str, name: str) -> None:
    run = parse_run(text)
    assert run.name == name
    assert parse_run(run.name) == run


def test_lists() -> None:
    assert names("reuse,union:2%", "epic") == ["reuse", "union:0.02", "epic:16"]
    assert names("reuse,,reuse, blend:5%,blend:0.05") == ["reuse", "blend:0.05"]
    assert names("full,reuse,full") == ["reuse"]  # the reference runs anyway
    assert names("full") == []


@pytest.mark.parametrize(
    "text",
    [
        *("blond", "auto", "blend@prefix", "union+shfit=no", "union+ratio=3%", "reuse+shift=no", "union+shift=perhaps"),
        *("blend+metric=v", "", "reuse:0.1", "reuse:", "blend:x", "blend:1.01", "epic:1.5", "epic:-1"),
    ],
)
def test_bad_runs(text: str) -> None:
    with refused(UsageError):
        parse_run(text)


def test_a_list_of_nothing() -> None:
    with refused(UsageError):
        parse_runs([" , "])


def test_the_amount_reaches_the_selector() -> None:
    base = QueryOptions(ratio=0.9, link_tokens=3)
    for mode in SELECTORS:
        for amount in ("", ":7%", ":7"):
            try:
                run = parse_run(mode + amount)
            except UsageError:
                continue
            selector = selector_for(run.options(base), run.mode)
            assert selector.name == mode
            if run.knob:
                assert getattr(selector, run.knob) == run.amount


def test_what_a_run_changes_reaches_its_mode() -> None:
    run = parse_run("union+shift=no+weighting=2:5%")
    expected = SELECTORS["union"](ratio=0.05, weighting=2, shift=False)
    assert selector_for(run.options(QueryOptions()), run.mode) == expected


RUNS = tuple(
    parse_run(text)
    for text in ("full", "prefix", "reuse", "epic:4", "epic:30", "blend:0.1", "infoflow:0.1", "union:0.1", "union:0.6")
)
LONGEST = 12


def scratch(own: Case, spec: RunSpec, options: QueryOptions, chunks: tuple[tuple[int, ...], ...]) -> Generated:
    fused = fused_by(own, spec, options, chunks)
    sampling = Sampling.greedy(options.max_tokens)
    return generate(own.decoder, fused.cache, first_token(fused.logits, sampling), sampling)


def fused_by(own: Case, spec: RunSpec, options: QueryOptions, chunks: tuple[tuple[int, ...], ...] = CHUNKS) -> Fused:
    selector = selector_for(spec.options(options), spec.mode)
    return fuse(own.decoder, own.plan(chunks), selector, own.source, reserve=options.max_tokens)


def paired(own: Case, options: QueryOptions, chunks: tuple[tuple[int, ...], ...] = CHUNKS) -> PairedRun:
    asked = PromptLayout(Request("?", answers=("gold",)), (), own.plan(chunks), 0.0)
    return PairedRun(own.decoder, own.source, asked, options)


def both(own: Case, options: QueryOptions, chunks: tuple[tuple[int, ...], ...] = CHUNKS) -> list[tuple[int, Generated]]:
    """Every run's answer, checked against scratch; with each how many of the reference's tokens it begins with."""
    whole = scratch(own, RUNS[0], options, chunks)
    reference = Reference.of(own.decoder, fused_by(own, RUNS[0], options, chunks), whole)
    found = []
    rows = dict(paired(own, options, chunks).rows([run for run in RUNS if run.mode != "full"]))
    for spec in RUNS:
        wanted = scratch(own, spec, options, chunks)
        answer = reference.force(fused_by(own, spec, options, chunks)).answer(options.max_tokens)
        assert (answer.ids, answer.end, answer.text) == (wanted.ids, wanted.end, wanted.text), spec.name
        row = rows[spec.name]
        assert row["answer"] == wanted.text.strip()
        assert row["answer_equal"] == (wanted.ids == whole.ids)
        pairs = list(zip(answer.script, whole.script, strict=False))
        found.append((next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs)), answer))
    return found


def test_every_mode_is_among_the_runs() -> None:
    assert {run.mode for run in RUNS} == set(SELECTORS)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "longest"), [*((name, LONGEST) for name in NAMES), *(("llama", count) for count in (1, 2))]
)
def test_answers_equal_generation_from_scratch(name: str, longest: int) -> None:
    both(case(name), QueryOptions(max_tokens=longest))


@pytest.mark.slow
def test_the_ways_an_answer_can_go() -> None:
    own, options = case("llama"), QueryOptions(max_tokens=12)
    prompts = [(tokens(30, seed), tokens(50, seed + 90)) for seed in range(6)]
    agreed = {length for chunks in prompts for length, _ in both(own, options, chunks)}
    assert agreed > {0, 12}


@pytest.mark.slow
def test_answers_that_end() -> None:
    own, options = new_case("llama"), QueryOptions(max_tokens=12)
    prompts = [(tokens(30, seed), tokens(50, seed + 90)) for seed in range(4)]
    ends = set()
    for at in (0, 3, 11):
        said = scratch(own, RUNS[0], options, prompts[0]).ids
        own.decoder.model.generation_config.eos_token_id = [1, said[min(at, len(said) - 1)]]
        for chunks in prompts:
            ends |= {(len(answer.ids), answer.end is not None) for _, answer in both(own, options, chunks)}
        own.decoder.model.generation_config.eos_token_id = [1]
    assert (12, False) in ends
    assert (0, True) in ends
    assert len({length for length, ended in ends if ended}) > 2


@pytest.mark.parametrize("name", NAMES)
def test_distances_by_transformers_alone(name: str) -> None:
    """Eager attention of the unmodified model, KL in numpy: none of kvtool's own passes, scripts' logits or scores."""
    own, options = case(name), QueryOptions(max_tokens=6)
    plan, start = own.plan(), own.plan().segments[-1].start
    whole = scratch(own, RUNS[0], options, CHUNKS)
    assert whole.ids == plain_text(name, own.dtype, tuple(plan.ids), options.max_tokens)
    script = whole.script
    full = plain_log_p(own, plan.ids, script, None)
    rows = dict(paired(own, options).rows(RUNS[1:]))
    for spec in RUNS[1:]:
        fused = fused_by(own, spec, options)
        past = past_of(own, ((buffer.keys, buffer.values) for buffer in fused.cache.buffers), start)
        mine = plain_log_p(own, plan.ids[start:], script, past)
        divergence = (np.exp(full) * (full - mine)).sum(-1)
        assert rows[spec.name]["kl_first"] == pytest.approx(divergence[0], abs=1e-5)
        assert rows[spec.name]["kl_answer"] == pytest.approx(divergence.mean(), abs=1e-5)


def plain_log_p(own: Case, ids: list[int], script: Sequence[int], past: DynamicCache | None) -> np.ndarray:
    """Before each token of the script: float64 `[len(script), vocabulary]`."""
    out = run_plain(own, [*ids, *script[:-1]], past)
    logits: np.ndarray = out.logits[0, len(ids) - 1 :].double().log_softmax(-1).numpy()
    return logits


def test_counts_and_holes() -> None:
    own, options = case("llama"), QueryOptions(max_tokens=2)
    asked = PromptLayout(Request("?"), (), own.plan(holes=[1]), 5000.0)
    rows = dict(PairedRun(own.decoder, own.source, asked, options).rows(RUNS[1:]))
    for row in rows.values():
        assert row["reused"] + row["recomputed"] + row["fresh"] == asked.plan.length
        assert row["holes"] == ["not stored"]
        assert row["ttft_ms"] > 5000  # retrieval is part of it
        assert row["speedup"] == pytest.approx(rows["full"]["ttft_ms"] / row["ttft_ms"])
        assert "f1" not in row  # no answers are known
    assert rows["reuse"]["recomputed"] == rows["full"]["reused"] == rows["full"]["bytes_read"] == 0
