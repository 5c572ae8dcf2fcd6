"""Products of the decode: as torch makes them, on every instruction set, with every option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtool.core.codec import transform
from kvtool.core.codec import transform_kernels as products
from kvtool.core.codec.backend import CpuBackend, GpuBackend, TorchBackend, backend_for
from kvtool.core.codec.base import DTYPES
from kvtool.core.codec.cachegen import shipped
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import SIDES, Layout
from kvtool.core.codec.rans.coder import finer_symbols
from kvtool.core.codec.rans.tables import ZERO, in_order
from kvtool.core.codec.transform import coarsened
from kvtool.core.common.machine import FEATURES
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.native import isa as isas
from kvtool.core.native.isa import best_isa, multiplies_bfloat16, runnable
from kvtool.core.native.simd import Tile, tile_of
from tests.codec.synthetic import KV, LAYERS, encode_nested, model, profile
from tests.wording import refused


def dice(*shape: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights_of(
    layout: Layout, depths: list[int], tile: Tile
) -> tuple[list[torch.Tensor], torch.Tensor, products.Weights]:
    matrices = [dice(depth, layout.size) for depth in depths]
    means = dice(len(depths), layout.size)
    return matrices, means, products.Weights.of(matrices, means, tile)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    ("groups", "heads", "dim", "tokens"), [(1, 2, 24, 1), (2, 4, 20, 97), (1, 3, 64, 200), (2, 2, 1, 7)]
)
def test_numbers_are_those_of_torch(machine: str, dtype: str, groups: int, heads: int, dim: int, tokens: int) -> None:
    layout = Layout(groups, heads // groups * dim)
    isa = best_isa()
    matrices, means, weights = weights_of(layout, [layout.size] * SIDES * groups, tile_of(isa))
    whole = dice(SIDES, tokens, heads, dim, size=3.0).to(DTYPES[dtype])
    sides = [whole[0].transpose(0, 1), whole[1].transpose(0, 1).contiguous()]
    out = np.full((1, tokens, layout.stride), 77, np.int16)
    assert products.numbers_of(isa, layout, [weights], sides, out)
    for side in range(SIDES):
        for group in range(groups):
            at = side * groups + group
            rows = sides[side].transpose(0, 1).reshape(tokens, groups, -1)[:, group].double()
            wanted = (rows - means[at].double()) @ matrices[at].double()
            start = layout.start(side, group)
            made = torch.from_numpy(out[0, :, start : start + layout.size]).double()
            assert (made - wanted).abs().max() <= 0.5 + 1e-3
            assert not out[0, :, start + layout.size : start + layout.padded].any()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_ties_go_to_the_even_number_and_the_largest_ends(machine: str, dtype: str) -> None:
    layout = Layout(1, 40)
    isa = best_isa()
    weights = products.Weights.of([torch.eye(40)] * 2, torch.zeros(2, 40), tile_of(isa))
    ends = [0.5, 1.5, -0.5, -2.5, 40000.0, -40000.0]
    side = torch.tensor([ends * 7])[:, None, :40].to(DTYPES[dtype])
    out = np.zeros((1, 1, layout.stride), np.int16)
    assert products.numbers_of(isa, layout, [weights], [side, side], out)
    assert out[0, 0, :6].tolist() == [0, 2, 0, -2, 32766, -32767]
    assert out[0, 0, 39] == -2


@pytest.mark.some(20)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 17, 23])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_number_that_is_not_finite_is_seen(machine: str, dtype: str, place: int, odd: float) -> None:
    keys, values = (side.clone() for side in model().kv(0, 30, dtype=DTYPES[dtype]))
    values[1, 29, place] = odd
    with refused(KvtoolError):
        encode_nested(keys, values, 0, ["2"], profile())


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("groups", "size", "tokens"), [(1, 48, 1), (2, 20, 97), (1, 192, 200), (3, 64, 5)])
@pytest.mark.parametrize("pairs", [False, True])
def test_sides_are_those_of_torch(machine: str, pairs: bool, dtype: str, groups: int, size: int, tokens: int) -> None:
    """Rounded once; columns that are not coded, and groups of which nothing is, add nothing."""
    layout, isa = Layout(groups, size), best_isa()
    if pairs and (dtype != "bfloat16" or not multiplies_bfloat16(isa)):
        pytest.skip("the CPU does not multiply pairs")
    tile = products.backward_kernel(layout, DTYPES[dtype], pairs).tile(isa)
    widths = [layout.padded if at % 3 == 0 else 32 if at % 3 == 1 else 0 for at in range(SIDES * groups)]
    matrices, means, weights = weights_of(layout, widths, tile)
    if pairs:
        matrices = [matrix.bfloat16() for matrix in matrices]
    random = np.random.default_rng(1)
    numbers = random.integers(-9, 10, (1, tokens, layout.stride)).astype(np.int16)
    numbers[0, 0, :4] = 300, -2049, 32766, -32767
    out = torch.empty((1, SIDES, tokens, groups, size), dtype=DTYPES[dtype])
    products.sides_of(isa, layout, [weights], [widths], numbers, out, pairs)
    for at, width in enumerate(widths):
        side, group = divmod(at, groups)
        taken = torch.from_numpy(numbers[0, :, at * layout.padded :][:, :width]).to(DTYPES[dtype]).double()
        wanted = taken @ matrices[at].double() + means[at].double()
        made = out[0, side, :, group].double()
        finite = wanted.abs() < torch.finfo(DTYPES[dtype]).max
        near = torch.finfo(DTYPES[dtype]).eps * wanted.abs() + 1e-5 * taken.abs().sum(1, keepdim=True).clamp_min(1)
        assert ((made - wanted).abs() <= near)[finite].all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_errors_are_those_of_doubles(machine: str, dtype: str) -> None:
    shapes = [(3, 17, 24), (3, 1, 24), (3, 130, 24)]
    exact = [dice(*shape).to(DTYPES[dtype]) for shape in shapes]
    made = [(side + dice(*side.shape).flip(0) / 50).to(DTYPES[dtype]) for side in exact]
    made[2] = made[2].transpose(0, 1).contiguous().transpose(0, 1)
    for error, left, right in zip(products.errors_of(made, exact), made, exact, strict=True):
        wrong = (left.double() - right.double()).square().mean().sqrt() / right.double().square().mean().sqrt()
        assert error == pytest.approx(float(wrong), rel=1e-6)
    zeros = [torch.zeros(2, 3, 5, dtype=DTYPES[dtype])]
    assert products.errors_of(zeros, zeros) == [0.0]
    assert products.errors_of([], []) == []
    for other in (exact[0][:, :9], exact[0][:, :, :9], exact[0].double()):
        with pytest.raises(ValueError):
            products.errors_of([other], [exact[0]])


def test_every_number_nests(machine: str) -> None:
    numbers = np.arange(-32767, 32767, dtype=np.int16)
    numbers = np.concatenate([numbers, numbers[: -len(numbers) % 32]]).reshape(1, -1, 32)
    made = coarsened(numbers, np.empty_like(numbers))
    assert np.array_equal(made, coarsened(numbers))
    columns = [in_order(np.zeros(64, np.uint16), shipped())]
    pairs = numbers.reshape(1, -1, 64), made.reshape(1, -1, 64)
    ((symbols, contexts),) = finer_symbols(*pairs, columns)
    fine, coarse = (part.astype(int)[0] for part in pairs)
    rest = symbols.astype(int) - ZERO
    assert {*np.unique(rest).tolist()} <= {-1, 0, 1}
    assert np.array_equal(3 * coarse + np.where(coarse < 0, -rest, rest), fine)
    assert np.array_equal(contexts, np.minimum(np.abs(coarse), 2))


def some_layers(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[KV]:
    return [model().kv(layer, tokens, dtype=dtype) for layer in range(LAYERS)]


def joined(records: list[Any]) -> list[bytes]:
    return [b"".join(parts) for parts in records]


@pytest.mark.some(4)
@pytest.mark.parametrize("at_once", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_record_does_not_depend_on_its_batch(
    machine: str, groups: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, kvs = profile(groups=groups), some_layers(53)
    single = [encode_nested(*kv, layer, NESTED, of) for layer, kv in enumerate(kvs)]
    monkeypatch.setattr(transform, "ENCODED_AT_ONCE", at_once)
    transform.encode_nested(of, range(LAYERS), some_layers(70), NESTED)
    together = transform.encode_nested(of, range(LAYERS), kvs, NESTED)
    for level in NESTED:
        assert joined(together[level]) == [b"".join(one[level]) for one in single]


@pytest.mark.skipif({"avx2", "avx512"} - {*runnable()} != set(), reason="needs both instruction sets")
def test_instruction_sets_with_fused_products_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("avx2", "avx512"):
        monkeypatch.setattr(isas, "runnable", lambda name=name: (name,))
        made.append(transform.encode_nested(profile(), range(LAYERS), some_layers(40), ["1", "2"]))
    wanted, other = ([record[80:] for level in ("1", "2") for record in joined(one[level])] for one in made)
    assert wanted == other


def test_rows_without_tokens(machine: str) -> None:
    kvs = some_layers(0)
    for records in transform.encode_nested(profile(), range(LAYERS), kvs, ["1", "4"]).values():
        assert len(joined(records)) == LAYERS


def test_what_does_not_fit_is_refused_before_it_is_read(machine: str) -> None:
    keys, values = model().kv(0, 5)
    wider = torch.cat([keys, keys[:, :, :1]], 2)
    for wrong in ((wider, values), (keys, torch.cat([values, values[:1]]))):
        with pytest.raises(DamagedError):
            encode_nested(*wrong, 0, ["2"], profile(groups=2))
    for layer in (-1, LAYERS):
        with pytest.raises(DamagedError):
            encode_nested(keys, values, layer, ["2"], profile())
    for wrong in ((keys, values[:, :4]), (keys, values.bfloat16())):
        with pytest.raises(ValueError):
            encode_nested(*wrong, 0, ["2"], profile())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("level", NESTED)
def test_what_is_decoded_here_and_by_torch(machine: str, level: str, dtype: str) -> None:
    """The same but for roundings: one of them states an error that holds for the other."""
    of, layout = profile(), profile().layout
    numbers = np.random.default_rng(0).integers(-20, 21, (1, 31, layout.stride)).astype(np.int16)
    out = []
    by_torch = TorchBackend() if dtype == "bfloat16" else GpuBackend(torch.device("cpu"))
    for backend in (by_torch, CpuBackend(), backend_for(DTYPES[dtype])):
        made = torch.empty((1, SIDES, 31, layout.groups, layout.size), dtype=DTYPES[dtype])
        backend.multiply(of, [1], level, torch.from_numpy(numbers), made)
        out.append(made.float())
    for other in out[1:]:
        apart = (out[0] - other).abs()
        assert apart.max() <= 2 * torch.finfo(DTYPES[dtype]).eps * out[0].abs().max()
        assert apart.mean() <= 0.01 * torch.finfo(DTYPES[dtype]).eps * out[0].abs().max() + 1e-6


@pytest.mark.parametrize(
    ("features", "machine", "pairs"),
    [
        ("avx512f avx512_bf16", "avx512", True),
        ("avx512f avx512_bf16 amx_bf16", "avx512", False),
        ("avx512f avx512_bf16", "avx2", False),
        ("avx512f", "avx512", False),
    ],
)
def test_who_multiplies_bfloat16(features: str, machine: str, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isas, "runnable", lambda: (machine,))
    monkeypatch.setenv(FEATURES, features)
    torchs = type(backend_for(torch.bfloat16)) is TorchBackend
    assert (backend_for(torch.bfloat16) == CpuBackend(pairs=True)) is pairs
    assert torchs is ("bf16" in features and not pairs)
    assert backend_for(torch.float32) == CpuBackend()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert backend_for(torch.bfloat16) == CpuBackend()
