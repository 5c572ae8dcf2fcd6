"""Products of rows in 8-bit integers with packed weights: what they round, and that they lose nothing else."""

from __future__ import annotations

import llvmlite.binding
import pytest
import torch

from kvtool.core.kernels.linear.int8_ir import int8_gemm as int8_gemm_code
from kvtool.core.kernels.linear.int8_ir import multiplies, multiplies_row, row_product
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.qtensor import LAYOUTS, QuantizedTensor
from kvtool.core.kernels.linear.quantized import gemv, has_int8, has_int8_row, int8_gemm
from kvtool.core.native.builder import module
from kvtool.core.native.isa import (
    AVX2,
    AVX512,
    AVX512_VNNI,
    NEON,
    NEON_DOT,
    SCALAR,
    Isa,
    best_isa,
    multiplies_int8,
    runnable,
)
from tests.kernels.linear.matrices import dequantize, random_matrix
from tests.wording import refused

HERE = {isa.name: multiplies_int8(isa) for isa in (AVX2, AVX512, NEON) if isa.name in runnable()}
SETS = sorted({isa for isa in (*HERE.values(), AVX512 if "avx512" in HERE else None) if isa}, key=str)
CASES = [(isa, kind) for isa in SETS for kind in LAYOUTS if has_int8(random_matrix(kind, 16, 256), isa)]
pytestmark = pytest.mark.skipif(not SETS, reason="the CPU has no AVX2 and no dot product")


@pytest.fixture
def chosen() -> None:
    """Skip where the code is chosen by what the kernel says of the CPU, which an emulator does not tell."""
    if multiplies_int8(best_isa()) is None:
        pytest.skip("the CPU is not known to have such products")


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """X as it is multiplied: 127 steps on each side of 0 for the largest of a group."""
    groups = x.view(len(x), -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(most > 0, 127 / most, 0.0)
    return ((groups * factor).round().double() * (most.double() / 127)).view_as(x)


def close(found: torch.Tensor, x: torch.Tensor, matrix: QuantizedTensor, bias: torch.Tensor | None = None) -> None:
    weights, own = dequantize(matrix).double(), rounded(x, matrix.layout.group)
    layout, size = matrix.layout, own.abs() @ weights.abs().T
    if layout.is_shifted or layout.bits == 8:  # codes and mins are multiplied apart, and cancel each other
        size = own.abs() @ (weights.abs() + 256 * weights.abs().max()).T
    wanted = own @ weights.T + (0 if bias is None else bias.double())
    assert ((found.double() - wanted).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize(("isa", "kind"), CASES, ids=str)
def test_it_is_the_product_of_the_rounded_rows(isa: Isa, kind: str) -> None:
    for outputs, columns, rows in ((16, 256, 9), (48, 768, 33), (32, 288, 5)):
        if columns % LAYOUTS[kind].multiple == 0:
            matrix = random_matrix(kind, outputs, columns)
            x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 10
            x[2], x[3, :40] = 0, 1e-20
            bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
            close(int8_gemm(matrix, x, isa=isa), x, matrix)
            close(int8_gemm(matrix, x, bias, isa), x, matrix, bias)


@pytest.mark.parametrize(("isa", "kind"), CASES, ids=str)
def test_no_sum_is_too_large_for_its_bits(isa: Isa, kind: str) -> None:
    random = random_matrix(kind, 16, 512)
    most = torch.full_like(random.data, 127 if kind == "q8_0" else 255)
    matrix = QuantizedTensor(kind, 16, 512, most, random.scales, random.group_mins)
    for x in (torch.full((8, 512), 3.0), torch.full((8, 512), -3.0)):
        close(int8_gemm(matrix, x, isa=isa), x, matrix)
        if has_int8_row(matrix, isa):
            close(gemv(matrix, x[0], isa, int8=True)[None], x[:1], matrix)


@pytest.mark.parametrize(("isa", "kind"), CASES, ids=str)
def test_what_is_no_number_stays_none_in_its_row(isa: Isa, kind: str) -> None:
    """And what is too small for its scale is 0, not another number."""
    matrix, x = random_matrix(kind, 16, 256), torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    clean = int8_gemm(matrix, x, isa=isa)
    x[1, 37], x[3, 0], x[5, 255] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = 1e-40, -1e-37
    found = int8_gemm(matrix, x, isa=isa)
    assert not found[[1, 3, 5]].isfinite().any()
    assert (found[[6, 7]].abs() <= x[[6, 7]].abs() @ dequantize(matrix).abs().T).all()
    assert torch.equal(found[[0, 2, 4, 8]], clean[[0, 2, 4, 8]])
    if has_int8_row(matrix, isa):
        single = torch.stack([gemv(matrix, row.contiguous(), isa, int8=True) for row in x])
        assert torch.equal(single.isfinite(), found.isfinite())
        assert (single[[6, 7]].abs() <= x[[6, 7]].abs() @ dequantize(matrix).abs().T).all()


@pytest.mark.parametrize("isa", SETS, ids=str)
def test_a_row_is_the_same_whatever_stands_beside_it(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = random_matrix("q4_k", 48, 512), torch.randn(600, 512, generator=torch.Generator().manual_seed(0))
    whole = int8_gemm(matrix, x, isa=isa)
    assert torch.equal(whole, int8_gemm(matrix, x, isa=SETS[0]))
    for first, stop in ((5, 17), (40, 41), (597, 600)):
        assert torch.equal(int8_gemm(matrix, x[first:stop].contiguous(), isa=isa), whole[first:stop])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(int8_gemm(matrix, x, isa=isa), whole)


ROW_CASES = [(isa, kind) for isa, kind in CASES if has_int8_row(random_matrix(kind, 16, 256), isa)]


@pytest.mark.parametrize(("isa", "kind"), ROW_CASES, ids=str)
def test_a_single_row_is_unpacked_in_registers(isa: Isa, kind: str) -> None:
    for outputs, columns in ((7, 256), (48, 768), (1, 1536), (16, 384)):
        if columns % LAYOUTS[kind].multiple == 0:
            matrix = random_matrix(kind, outputs, columns)
            for x in (torch.randn(columns, generator=torch.Generator().manual_seed(1)) * 10, torch.zeros(columns)):
                close(gemv(matrix, x, isa, int8=True)[None], x[None], matrix)


def test_rows_that_do_not_fill_registers_have_no_such_product(chosen: None) -> None:
    odd = random_matrix("q4_1", 16, 32)
    assert not has_int8_row(odd)
    with refused(ValueError, numbers=True):
        gemv(odd, torch.ones(32), int8=True)
    assert not PackedLinear(odd, None, torch.float32, int8=True).int8_row


def test_a_layer_rounds_its_rows(chosen: None) -> None:
    matrix, x = random_matrix("q4_1", 32, 64), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.ones(32)
    layer, plain = (PackedLinear(matrix, bias, torch.float32, int8) for int8 in (True, False))
    wanted = int8_gemm(matrix, x.view(10, 64), bias).view(2, 5, 32)
    assert layer.in_team(2, torch.float32)
    assert not layer.in_team(1, torch.float32)
    assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.rows_product(x[:, ::2]), wanted[:, ::2])
    single = gemv(matrix, x[0, 0], int8=layer.int8_row) + bias
    assert torch.equal(layer(x[0, 0]), single)
    assert torch.equal(layer.rows_product(x[:1, 0]), single[None])
    assert not torch.equal(plain(x), wanted)
    wide = PackedLinear(random_matrix("q4_k", 32, 512), None, torch.float32, int8=True)
    assert wide.int8_row
    assert not torch.equal(wide(torch.ones(512).cumsum(0)), gemv(wide.matrix, torch.ones(512).cumsum(0)))
    odd = PackedLinear(random_matrix("q4_1", 6, 64), None, torch.float32, int8=True)  # not of a register's lanes
    assert not odd.int8
    assert torch.equal(odd(x), PackedLinear(odd.matrix, None, torch.float32)(x))


def test_machine_code_sees_no_wrong_sizes(chosen: None) -> None:
    matrix, x = random_matrix("q4_1", 32, 64), torch.randn(8, 64)
    for wrong in (x[:, :32].contiguous(), x.bfloat16(), x[:, :64:2], x.t()):
        with refused(ValueError):
            int8_gemm(matrix, wrong)
    for weights, *more in ((matrix, x, torch.ones(31)), (random_matrix("q4_1", 6, 64), x)):
        with refused(ValueError):
            int8_gemm(weights, *more)
    assert multiplies_int8(SCALAR) is multiplies_int8(None) is None
    assert multiplies_int8(NEON) in (NEON_DOT, None)
    assert multiplies_int8(AVX512) in (AVX512, AVX512_VNNI)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if multiplies(NEON_DOT, LAYOUTS[kind])])
def test_it_compiles_for_arm(kind: str) -> None:
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    target = llvmlite.binding.Target.from_triple("aarch64-linux-gnu")
    machine = target.create_target_machine(cpu=NEON_DOT.cpu, opt=2)
    functions = [int8_gemm_code(NEON_DOT, kind)]
    functions += [row_product(NEON_DOT, kind)] if multiplies_row(NEON_DOT, LAYOUTS[kind]) else []
    for function in functions:
        text = module(function)
        assert "llvm.x86" not in text
        assert "sdot" in machine.emit_assembly(llvmlite.binding.parse_assembly(text))
