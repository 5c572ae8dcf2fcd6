"""Streaming over simulated links: link and rules by hand, the promises of `results/streaming.md`, and the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.streaming.fetch_state import Policy, Task, make_estimator
from samples.benchmarks import stream
from samples.benchmarks.streaming.bench import ADAPTIVE, ALL, LINK, TEXT, StreamBench, StreamOptions, bench_stream
from samples.benchmarks.streaming.context import DEFAULT_LEVELS, Context, shape_context
from samples.benchmarks.streaming.rules import CacheGenRule, Fixed
from samples.benchmarks.streaming.simulate import Outcome, mean_loss, simulate
from samples.benchmarks.streaming.speeds import GivenSpeeds
from samples.benchmarks.streaming.traces import LinkTrace, generate, read_trace, write_trace
from tests.cli.working import kvtool, script
from tests.streaming.making import LOSSES, MB, ladder, steady, task

MEASURED = DEFAULT_LEVELS.levels
SHAPE = ("--shape", "qwen2.5-0.5b", "--context", "3000", "--slo-ms", "100,400")


def fixed(one: Task, trace: LinkTrace, level: str = "4", depth: int = 2) -> Outcome:
    return simulate(Fixed(one, make_estimator("last"), level), one, trace, depth)


def test_latency_passes_while_the_request_before_is_transferred() -> None:
    one = task(chunks=4, objective=None, question=0.0)  # 1 MB each: 10 ms at 800 Mbit/s
    assert fixed(one, steady(800, latency_ms=8)).ttft_s == pytest.approx(0.048)
    assert fixed(one, steady(800, latency_ms=8), depth=1).ttft_s == pytest.approx(4 * 0.018)
    # A longer latency than two transfers: two requests a round.
    assert fixed(one, steady(800, latency_ms=30)).ttft_s == pytest.approx(0.04 + 0.01 + 0.03 + 0.01)


@pytest.mark.parametrize(("decode_s", "ttft_s"), [(0.004, 0.044), (0.025, 0.01 + 4 * 0.025)])
def test_decoding_runs_during_fetching(decode_s: float, ttft_s: float) -> None:
    one = task(chunks=4, objective=None, question=0.0, decode=lambda tokens, level: decode_s)
    assert fixed(one, steady(800)).ttft_s == pytest.approx(ttft_s)


def test_rate_changes_during_a_transfer() -> None:
    trace = LinkTrace("t", "t", ((0.0, 800.0), (0.005, 0.0), (0.105, 80.0)))
    assert trace.end(0.0, MB) == pytest.approx(0.155)
    assert trace.end(0.2, MB) == pytest.approx(0.3)


def test_loss_is_the_mean_over_tokens() -> None:
    one = Task((ladder(0, tokens=300), ladder(1, tokens=100), ladder(2, tokens=400)), lambda texts: 0.0)
    assert mean_loss(one, {0: "4", 1: "2", 2: None}) == pytest.approx((300 * LOSSES["4"] + 100 * LOSSES["2"]) / 800)


def test_a_fixed_policy_fetches_its_level_or_computes_text() -> None:
    run = fixed(task(chunks=3, objective=0.01), steady(10), "2")
    assert (run.levels, run.bytes, run.met) == (dict.fromkeys(range(3), "2"), 3 * 4 * MB, False)  # and what it refines
    assert fixed(task(chunks=3, l4=1), steady(1000), "2").text_tokens == 3000


@pytest.mark.parametrize(
    ("one", "mbps", "levels"),
    [
        # 50 MB/s: the middle level (4 MB) takes 0.08 s. 0.42 s are left, 18.9 MB by the estimate less its margin: 4 MB
        # each of three is in time, 7 MB is not. 0.34 s: 7 MB each of two is. 0.2 s: 9 MB, so 7 MB again.
        (task(chunks=4, objective=0.5, question=0.0), 400, ["2", "2", "1", "1"]),
        (task(chunks=3, objective=0.3, question=0.0), 100, ["2", None, None]),
        (task(chunks=2, objective=None), 100, ["lossless"] * 2),
    ],
    ids=["finest in time", "text where none is", "no objective"],
)
def test_the_rule_of_cachegen(one: Task, mbps: float, levels: list[str | None]) -> None:
    policy: Policy = CacheGenRule(one, make_estimator("last"))
    assert list(simulate(policy, one, steady(mbps), depth=1).levels.values()) == levels


def test_generated_traces_are_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    found = generate()
    assert len({one.name for one in found}) == len(found) == 31
    for one in found:
        write_trace(one, tmp_path / "trace.csv")
        back = read_trace(tmp_path / "trace.csv")
        assert (back.name, back.kind, back.seed) == (one.name, one.kind, one.seed)
        assert [rate for _, rate in back.steps] == pytest.approx([rate for _, rate in one.steps], rel=1e-4)


# ---- the page ----


def subject(gpu: str = "a100", chunk_tokens: int = 1500, decode: float | None = None) -> Context:
    return shape_context("mistral-7b", 10_000, chunk_tokens, GivenSpeeds(gpu, None, decode))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "depth"), [(("a100", 1500, None), 2), (("a40", 1000, 20e9), 4)], ids=["a100", "slower GPU and decoding"]
)
def test_adaptive_is_in_time_as_often_as_any_other_policy_and_loses_less(
    context: tuple[str, int, float | None], depth: int
) -> None:
    found = bench_stream(subject(*context), generate(), StreamOptions((300, 500, 1000, 2000), depth=depth))
    assert len(found.kinds) == 8
    for kind in (ALL, *found.kinds):
        own, link = found.row(ADAPTIVE, kind), found.row(LINK, kind)
        assert own.met_share >= link.met_share, kind
        assert own.kl_answer < link.kl_answer, kind
        for policy in (*MEASURED, TEXT):
            other = found.row(policy, kind)
            assert own.met_share >= other.met_share, (kind, policy)
            if other.met_share == own.met_share and policy != TEXT and MEASURED[policy].loss:
                assert own.kl_answer < other.kl_answer, (kind, policy)
    assert found.row(ADAPTIVE).met_share > max(found.row(policy).met_share for policy in (*MEASURED, TEXT, LINK))


def test_a_slow_decoder_costs_no_request_that_a_fixed_policy_meets() -> None:
    found: StreamBench = bench_stream(subject(decode=5e9), generate(), StreamOptions((300, 500, 1000)))
    for kind in found.kinds:
        for policy in (*MEASURED, TEXT):
            assert found.row(ADAPTIVE, kind).met_share >= found.row(policy, kind).met_share, (kind, policy)


@pytest.mark.parametrize(("gpu", "text_ms"), [("a100", 747), ("a40", 1557)])
def test_times_over_a_steady_link_are_those_of_the_page(gpu: str, text_ms: float) -> None:
    one = subject(gpu)
    assert 1e3 * one.text_seconds() == pytest.approx(text_ms, abs=1)
    assert one.raw_bytes == 10_000 * 2 * 32 * 8 * 128 * 2
    ready = {row.policy: row.ready_ms for row in bench_stream(one, [], StreamOptions((500,))).ready}
    for level, of in MEASURED.items():
        assert ready[level] == pytest.approx(one.raw_bytes * of.bits / 16 * 8 / 3e9 * 1e3, rel=1e-6)


# ---- the script ----


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "drop.csv"
    path.write_text("# class: mine\n# latency_ms: 5\nseconds,mbps\n0,500\n0.05,100\n", encoding="utf-8")
    return path


def test_json_has_rows_by_class_and_objective(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "steady.csv"
    other.write_text("0,300\n", encoding="utf-8")
    found = script(stream.main, *SHAPE, "--trace", trace, "--trace", other, "--json").fine().json
    assert [(one["name"], one["class"]) for one in found["traces"]] == [("drop", "mine"), ("steady", "file")]
    policies = ["adaptive", "link", "cachegen", "4", "3", "2", "1", "int8", "lossless", "raw", "text"]
    rows = [(row["policy"], row["class"], row["slo_ms"]) for row in found["rows"]]
    assert rows == [(p, c, slo) for p in policies for c in ("all", "mine", "file") for slo in (None, 100.0, 400.0)]
    speeds = ("--decode-gb-per-s", "2", "--prefill-tokens-per-second", "5000")
    assert script(stream.main, *SHAPE, "--trace", trace, *speeds, "--json").fine().json["text_ms"] == pytest.approx(600)


def test_tables_name_policies_and_levels(trace: Path) -> None:
    done = script(stream.main, *SHAPE, "--trace", trace).fine()
    assert "adaptive" in done.out


def test_a_store_has_its_own_sizes_and_losses(plain: Path, trace: Path) -> None:
    kvtool("compress", "--store", plain, "--fit", "--level", "2", "4", "--questions", "2").fine()
    speed = ("--prefill-tokens-per-second", "5000")
    found = script(stream.main, "--store", plain, "--trace", trace, *speed, "--json").fine().json
    rows = {row["policy"]: row for row in found["rows"]}
    assert set(rows) == {"adaptive", "link", "cachegen", "4", "2", "raw", "text"}
    with Store.open(plain) as store:
        losses = MeasuredLosses(store).at_most()
        chunks = {ref.chunk_id for document in store.documents() for ref in document.chunks}
        sizes = [store.level_sizes(chunk) for chunk in chunks]
    for level in ("2", "4"):
        assert rows[level]["kl_answer"] == pytest.approx(losses[level])
    for level in ("raw", "4"):
        assert rows[level]["bytes_read"] == pytest.approx(sum(one[level] for one in sizes))
