"""The simulation's promise: the adaptive policy is in time wherever another one is, and loses less."""

from __future__ import annotations

import pytest

from samples.benchmarks.bench.machine import Architecture, LayerWeights, flops, full_work
from samples.benchmarks.bench.shapes import shape_config
from samples.benchmarks.streaming.bench import ADAPTIVE, ALL, LINK, TEXT, StreamBench, StreamOptions, bench_stream
from samples.benchmarks.streaming.context import DEFAULT_LEVELS, Context, shape_context
from samples.benchmarks.streaming.speeds import GivenSpeeds
from samples.benchmarks.streaming.traces import generate

MEASURED = DEFAULT_LEVELS.levels
FIXED = [level for level, of in MEASURED.items() if of.loss]  # `raw` and `lossless` lose nothing to compare


def subject(gpu: str = "a100", chunk_tokens: int = 1500, decode: float | None = None) -> Context:
    return shape_context("mistral-7b", 10_000, chunk_tokens, GivenSpeeds(gpu, None, decode))


@pytest.fixture(scope="module")
def result() -> StreamBench:
    return bench_stream(subject(), generate(), StreamOptions((300, 500, 1000, 2000)))


@pytest.fixture(scope="module")
def slower() -> StreamBench:
    """A slower GPU, and decoding that takes its time."""
    return bench_stream(subject("a40", 1000, 20e9), generate(), StreamOptions((300, 500, 1000, 2000), depth=4))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["result", "slower"])
def test_adaptive_is_in_time_as_often_as_the_best_fixed_policy_of_each_class_and_loses_less(
    which: str, request: pytest.FixtureRequest
) -> None:
    found: StreamBench = request.getfixturevalue(which)
    assert len(found.kinds) >= 6
    for kind in (ALL, *found.kinds):
        own = found.row(ADAPTIVE, kind)
        for policy in (*MEASURED, TEXT):
            assert own.met_share >= found.row(policy, kind).met_share, (kind, policy)
        for policy in FIXED:
            if found.row(policy, kind).met_share == own.met_share:
                assert own.kl_answer < found.row(policy, kind).kl_answer, (kind, policy)
    best = max(found.row(policy).met_share for policy in (*MEASURED, TEXT))
    assert found.row(ADAPTIVE).met_share > best  # over all classes no fixed policy keeps up


@pytest.mark.slow
@pytest.mark.parametrize("which", ["result", "slower"])
def test_what_is_computed_meanwhile_costs_no_class_a_request_and_loses_less(
    which: str, request: pytest.FixtureRequest
) -> None:
    found: StreamBench = request.getfixturevalue(which)
    for kind in (ALL, *found.kinds):
        own, link = found.row(ADAPTIVE, kind), found.row(LINK, kind)
        assert own.met_share >= link.met_share, kind
        assert own.kl_answer < link.kl_answer, kind
    assert found.row(ADAPTIVE).met_share > found.row(LINK).met_share


def test_a_slow_decoder_costs_no_request_that_a_fixed_policy_meets() -> None:
    found = bench_stream(subject(decode=5e9), generate(), StreamOptions((300, 500, 1000)))
    for kind in found.kinds:
        for policy in (*MEASURED, TEXT):
            assert found.row(ADAPTIVE, kind).met_share >= found.row(policy, kind).met_share, (kind, policy)


def test_where_text_is_in_time_so_is_adaptive(result: StreamBench) -> None:
    for slo_ms in (1000, 2000):
        assert result.row(TEXT, ALL, slo_ms).met_share == result.row(ADAPTIVE, ALL, slo_ms).met_share == 1


def test_a_context_of_a_7b_model_over_3_gbit_per_second() -> None:
    found = {
        gpu: {one.policy: one for one in bench_stream(subject(gpu), [], StreamOptions((500,))).ready}
        for gpu in ("a100", "a40")
    }
    assert found["a40"]["2"].sooner_than_text >= 3
    assert found["a100"]["3"].sooner_than_text >= 3
    for ready in found.values():
        assert ready["2"].sooner_than_int8 is not None
        assert ready["2"].sooner_than_int8 >= 1.6
        assert ready["2"].ready_ms == pytest.approx(10_000 * 65536 * 2.19 / 8 / 3e9 * 8 * 1e3, rel=1e-6)


def test_the_speed_of_the_gpu_is_that_of_its_source() -> None:
    class Llama7B:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 4096, 32, 32, 32
        head_dim, intermediate_size, vocab_size = 128, 11008, 32000

    for length, seconds in ((128, 0.016), (2048, 0.133)):
        keys = length * (length + 1) // 2
        assert GivenSpeeds().on_gpu(Llama7B()).seconds(length, keys) == pytest.approx(seconds, rel=0.01)
        assert GivenSpeeds("a40").on_gpu(Llama7B()).seconds(length, keys) == pytest.approx(
            seconds * 312 / 149.7, rel=0.01
        )


def test_text_takes_its_flops() -> None:
    one = subject()
    config = shape_config("mistral-7b")
    linear = config.hidden_size * 128 * 80 + 3 * config.hidden_size * config.intermediate_size
    model = Architecture((LayerWeights(linear, linear),) * 32, 4096, 0)
    seconds = flops(model, [full_work(10_000, (None,) * 32)]) / (2 * linear * 32) * one.passes.row
    assert one.text_seconds() == pytest.approx(seconds)
    assert subject(chunk_tokens=256).text_seconds() == pytest.approx(seconds)


def test_sizes_are_the_measured_bits_of_the_shape() -> None:
    one = subject()
    assert one.raw_bytes == 10_000 * 2 * 32 * 8 * 128 * 2
    for level, of in MEASURED.items():
        rungs = [ladder.rungs[0] for ladder in one.fixed[level]]
        assert sum(rung.size for rung in rungs) == pytest.approx(one.raw_bytes * of.bits / 16, rel=1e-6)
        assert {rung.loss for rung in rungs} == {of.loss}
    nested = [{rung.level: rung.size for rung in ladder.rungs} for ladder in one.ladders]
    assert [list(sizes) for sizes in nested] == [["4", "3", "2", "1", "lossless"]] * 7
    assert [sizes["2"] for sizes in nested] == [ladder.rungs[0].size for ladder in one.fixed["2"]]


def test_decoding_delays_what_is_decoded() -> None:
    free, slow = subject(), subject(decode=1e9)
    options = StreamOptions((500,))
    before, after = ({one.policy: one for one in bench_stream(each, [], options).ready} for each in (free, slow))
    assert after["2"].ready_ms > 1e3 * free.raw_bytes / 1e9
    assert after["raw"].ready_ms == before["raw"].ready_ms
