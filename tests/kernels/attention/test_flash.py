"""Our own attention against the formula, written out in float64, on every instruction set that runs here."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.common.machine import cpu_features
from kvtool.core.kernels.attention.flash_cpu import Kernel, kernel, shape_mismatch
from kvtool.core.kernels.attention.flash_ir import KEYS, Tiling
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, Spans
from kvtool.core.native.isa import AVX512_BF16, ISAS, runnable
from tests.kernels import formulas
from tests.kernels.formulas import attention
from tests.wording import refused

NAMES = [name for name in runnable() if name != "scalar"]
TILINGS = [Tiling(ISAS[name], stored) for name in NAMES for stored in ("float32", "bfloat16", "float16")]
if "avx512" in NAMES and "avx512bf16" in cpu_features():
    TILINGS.append(Tiling(AVX512_BF16, "bfloat16", pairs=True))
pytestmark = [
    pytest.mark.skipif(not TILINGS, reason="there is no kernel for this machine"),
    pytest.mark.usefixtures("one_thread"),
]
ERROR = {"float32": 3e-6, "float16": 6e-4, "bfloat16": 4e-3}  # of all numbers together, relative
PLAIN = AttentionParams(0.3)


def name(tiling: Tiling) -> str:
    return f"{tiling.isa.width * 32}-{tiling.stored}{'-pairs' if tiling.pairs else ''}"


every_tiling = pytest.mark.parametrize("tiling", TILINGS, ids=name)


def random(tiling: Tiling, *shape: int, seed: int = 0) -> torch.Tensor:
    return formulas.random(*shape, dtype=getattr(torch, tiling.stored), seed=seed)


def scattered(positions: list[int], window: int | None = None) -> Spans:
    places = torch.tensor(positions)
    begins = None if window is None else (places - window + 1).clamp_min(0)
    return Spans([(0, len(positions), 0)], places, begins)


def close(tiling: Tiling, out: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((out.double() - expected).norm() <= ERROR[tiling.stored] * expected.norm())


POSITIONS = {
    "one row": [0],
    "the last row": [199],
    "few": [3, 7, 50, KEYS - 1, KEYS, 199],
    "dense": list(range(200)),
    "every third": list(range(1, 200, 3)),
    "the end": list(range(150, 200)),
}
SHAPED = {
    "window": AttentionParams(0.3, window=37),
    "window of one": AttentionParams(0.3, window=1),
    "wide window": AttentionParams(0.3, window=500),
    "cap": AttentionParams(0.3, softcap=2.0),
    "sinks": AttentionParams(0.3, sinks=torch.linspace(-1, 4, 14)),
    "all": AttentionParams(0.3, window=100, softcap=1.5, sinks=torch.linspace(-1, 4, 14)),
}


@every_tiling
def test_a_key_out_of_the_window_is_not_looked_at(tiling: Tiling) -> None:
    """What is hidden may be any number, as what was never loaded is."""
    scoring, places = AttentionParams(0.3, window=40), list(range(160, 200, 3))
    query = random(tiling, 4, len(places), 32)
    key, value = random(tiling, 2, 200, 32, seed=1), random(tiling, 2, 200, 32, seed=2)
    out = kernel(tiling)(query, key, value, scoring, scattered(places, 40))
    key[:, :96] = torch.nan
    value[:, :96] = torch.nan
    assert torch.equal(kernel(tiling)(query, key, value, scoring, scattered(places, 40)), out)


@pytest.mark.some(27)
@every_tiling
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(
    ("scoring", "heads"),
    [*((one, (14, 2)) for one in SHAPED.values()), *((PLAIN, n) for n in ((2, 2), (14, 2), (60, 1)))],
)
def test_a_row_sees_the_keys_of_its_window_up_to_its_own(
    tiling: Tiling, scoring: AttentionParams, heads: tuple[int, int], positions: list[int]
) -> None:
    query = random(tiling, heads[0], len(positions), 32)
    key, value = random(tiling, heads[1], 200, 32, seed=1), random(tiling, heads[1], 200, 32, seed=2)
    out = kernel(tiling)(query, key, value, scoring, scattered(positions, scoring.window))
    assert out.dtype == query.dtype
    assert close(tiling, out, attention(query, key, value, scoring, torch.tensor(positions)))


@every_tiling
@pytest.mark.parametrize("dims", [(16, 16), (48, 16), (64, 80), (80, 64), (128, 128), (256, 256)], ids=str)
def test_heads_have_any_multiple_of_16(tiling: Tiling, dims: tuple[int, int]) -> None:
    query, key = random(tiling, 6, 70, dims[0]), random(tiling, 3, KEYS + 5, dims[0], seed=1)
    value, limits = random(tiling, 3, KEYS + 5, dims[1], seed=2), torch.arange(31, KEYS + 5)
    out = kernel(tiling)(query, key, value, PLAIN, Spans([(0, 70, 0)], limits))
    assert close(tiling, out, attention(query, key, value, PLAIN, limits))


@every_tiling
def test_tensors_may_be_laid_out_as_the_model_has_them(tiling: Tiling) -> None:
    query, key, value = (random(tiling, 30, heads, 32, seed=heads).transpose(0, 1) for heads in (4, 2, 2))
    room = torch.full((2, 100, 32), torch.nan, dtype=value.dtype)
    room[:, :30] = value  # in a buffer with spare rows after it
    out = kernel(tiling)(query, key, room[:, :30], PLAIN, scattered(list(range(30))))
    assert close(tiling, out, attention(query, key, value, PLAIN, torch.arange(30)))
    assert out.transpose(0, 1).is_contiguous()


@every_tiling
@pytest.mark.parametrize("lead", [0, 11, KEYS + 3])
def test_spans_see_the_lead_in_and_their_own_keys(tiling: Tiling, lead: int) -> None:
    lengths = [5, 1, 130, 16]
    query, key, value = (random(tiling, heads, sum(lengths), 32, seed=heads) for heads in (4, 2, 1))
    value = value.expand(2, -1, -1)
    lead_in = (random(tiling, 2, lead, 32, seed=8), random(tiling, 2, lead, 32, seed=9)) if lead else None
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    limits = torch.cat([torch.arange(lead, lead + length) for length in lengths])
    spans = Spans([(start, length, start) for start, length in zip(starts, lengths, strict=True)], limits)
    out = kernel(tiling)(query, key, value, PLAIN, spans, lead_in)
    for start, length in zip(starts, lengths, strict=True):
        span = slice(start, start + length)
        keys, values = key[:, span], value[:, span]
        if lead_in:
            keys, values = torch.cat([lead_in[0], keys], 1), torch.cat([lead_in[1], values], 1)
        assert close(tiling, out[:, span], attention(query[:, span], keys, values, PLAIN, limits[span]))
        alone = kernel(tiling)(
            query[:, span], key[:, span], value[:, span], PLAIN, Spans([(0, length, 0)], limits[span].clone()), lead_in
        )
        assert torch.equal(alone, out[:, span])  # bit for bit: what a chunk gives does not depend on its batch


@every_tiling
def test_a_row_depends_on_nothing_but_what_it_sees(tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: not on the other rows, the number of threads, or later keys, be they NaN."""
    query = random(tiling, 6, 300, 32)
    key, value = random(tiling, 2, 300, 32, seed=1), random(tiling, 2, 300, 32, seed=2)
    whole = kernel(tiling)(query, key, value, PLAIN, scattered(list(range(300))))
    some = sorted({7, 8, 100, 101, 102, 299 - 40, *range(180, 220)})
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        out = kernel(tiling)(query[:, some], key, value, PLAIN, scattered(some))
        assert torch.equal(out, whole[:, some])
    key[:, 260:], value[:, 260:] = torch.nan, torch.inf
    assert torch.equal(kernel(tiling)(query[:, some], key, value, PLAIN, scattered(some)), whole[:, some])


@every_tiling
def test_nan_and_infinity_are_not_hidden(tiling: Tiling) -> None:
    query, key, value = (random(tiling, 2, 20, 16, seed=at) for at in range(3))
    key[:, 10, 3] = torch.nan
    out = kernel(tiling)(query, key, value, PLAIN, scattered(list(range(20))))
    assert out[:, :10].isfinite().all()
    assert out[:, 10:].isnan().all()


@every_tiling
def test_scores_far_apart_and_far_from_zero(tiling: Tiling) -> None:
    """Weights may underflow, and a large part that all scores share must not swallow their differences."""
    query, key, value = (random(tiling, 2, KEYS * 2, 32, seed=at) for at in range(3))
    last = torch.arange(KEYS * 2)
    query[..., 0] = key[..., 0] = 40.0
    query[..., 1] = 100.0
    expected = attention(query, key, value, AttentionParams(0.2), last)
    out = kernel(tiling)(query, key, value, AttentionParams(0.2), scattered(last.tolist()))
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (1e-4 if tiling.stored == "float32" else 4e-3)


@every_tiling
def test_machine_code_sees_no_wrong_sizes(tiling: Tiling) -> None:
    own: Kernel = kernel(tiling)
    query, key = random(tiling, 4, 10, 16), random(tiling, 2, 10, 16)
    rows = scattered(list(range(10)))
    assert not shape_mismatch(AttentionCall.of(query[None], key[None], key[None], PLAIN))
    for wrong in (
        (query, key[..., :8], key),
        (query[..., :8], key[..., :8], key),
        (query[:3], key, key),
        (query, key, key[:1]),
        (query, key[:, :9], key[:, :9]),
        (query, key, key[:, :9]),
        (query[:, :9], key, key),
        (query.double(), key, key),
        (query.repeat(100, 1, 1), key, key),
    ):
        with refused(ValueError):
            own(*wrong, PLAIN, rows)
    with refused(ValueError):
        own(query, key, key, PLAIN, Spans([(0, 10, 1)], rows.limits))
    for lead_in in ((key[..., :8], key), (key[:1], key[:1]), (key, key[:, :9]), (key[:, :9], key)):
        with refused(ValueError):
            own(query, key, key, PLAIN, rows, lead_in)
    other = query.half() if tiling.stored != "float16" else query.float()
    with refused(ValueError):
        own(other, other[:2], other[:2], PLAIN, rows)


@pytest.mark.parametrize(
    "spans", [[(0, 11, 0)], [(0, 5, 0)], [(5, 5, 0), (0, 5, 0)], [(0, 10, -1)], [(0, 10, 0), (10, 0, 0)], []], ids=str
)
def test_spans_cover_the_rows(spans: list[tuple[int, int, int]]) -> None:
    with refused(ValueError):
        Spans(spans, torch.arange(10))


def test_every_row_sees_something() -> None:
    for limits in (torch.arange(10) - 1, torch.arange(10).int(), torch.arange(20)[::2]):
        with refused(ValueError):
            Spans([(0, 10, 0)], limits)
