"""Numbers are rounded to stored formats and widened again as torch does it, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvtool.core.native.builder import FunctionBuilder, Value, module
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.simd import each

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# One more than a multiple of any register's lanes, so that single numbers are rounded, too.
RANDOM = 40_001


def converting(name: str, source: str, target: str, keeps_nan: bool = False) -> Function:
    """`run(job)`: stores job[2] numbers, which are at job[0] in one format, at job[1] in another."""
    isa = ISAS[name]
    k = FunctionBuilder("run", isa, "i64* job")
    k.keeps_nan = keeps_nan
    given, out = (k.args.job.at(at).of("ptr").load() for at in (0, 1))

    def convert(lanes: int, index: Value) -> None:
        out.of(target).store(given.of(source).load(index, lanes), index)

    each(k, k.args.job.load(2), convert)
    return compiled(module(k), isa, "run")[0]


def converted(function: Function, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full_like(numbers, 7, dtype=dtype)
    job = torch.tensor([numbers.data_ptr(), out.data_ptr(), len(numbers)])
    function(job.data_ptr(), 0, 0, 0)
    return out


def edges(form: str) -> torch.Tensor:
    """Ties, numbers next to them, both ends of the range, subnormal numbers, zeros and infinities, of both signs."""
    last = 2.0**-8 if form == "bfloat16" else 2.0**-11
    found = [1 + last, 1 + 3 * last, 2 - last, 1 + last + 2**-23, 1 + last - 2**-23, 2.0**-25, 3 * 2.0**-25, 2.0**-14]
    found += [2.0**-14 - 2.0**-25, 2.0**-24, 1e-30, 1e-40, 65503.9, 65504, 65519.99, 65520, 65536, 1e9, 3.4e38, 0.0]
    found += [2.0**-25 + 2.0**-40, 2.0**-15, 0.1, torch.inf]
    return torch.tensor([*found, *(-number for number in found)], dtype=torch.float32)


def of_every_size() -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (RANDOM,), dtype=torch.int64, generator=torch.Generator().manual_seed(3))
    numbers = bits.to(torch.int32).view(torch.float32)
    return torch.where(numbers.isfinite(), numbers, 0.0)


@pytest.mark.parametrize("numbers", [edges, lambda form: of_every_size()], ids=["edges", "of every size"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", runnable())
def test_rounding_is_torchs(name: str, form: str, numbers: Callable[[str], torch.Tensor]) -> None:
    given = numbers(form)
    found = converted(converting(name, "float32", form), given, FORMATS[form])
    assert torch.equal(found.view(torch.int16), given.to(FORMATS[form]).view(torch.int16))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", runnable())
def test_every_number_is_widened_as_torch_does(name: str, form: str) -> None:
    given = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FORMATS[form])
    given = given[~given.isnan()].clone()
    found = converted(converting(name, form, "float32"), given, torch.float32)
    assert torch.equal(found.view(torch.int32), given.float().view(torch.int32))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", runnable())
def test_nan_stays_nan_where_a_kernel_asks_for_it(name: str, form: str) -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).repeat(5)
    given = bits.view(torch.float32)
    assert bool(given.isnan().all())
    found = converted(converting(name, "float32", form, keeps_nan=True), given, FORMATS[form])
    assert bool(found.isnan().all())
