"""The emitter refuses what LLVM would, at the line that says it."""

from __future__ import annotations

import pytest

from kvtool.core.native.builder import FunctionBuilder, module
from kvtool.core.native.isa import AVX2
from kvtool.core.native.jit import Job
from tests.wording import refused

JOB = Job(rows="float*", count="i64", scale="float")


@pytest.fixture
def k() -> FunctionBuilder:
    return FunctionBuilder("run", AVX2, "float* x, i32* words, i64 count, i32 short")


def test_types_are_not_mixed(k: FunctionBuilder) -> None:
    args = k.args
    for wrong in (
        lambda: args.count + args.short,
        lambda: args.x.load() / args.x.load(lanes=8),
        lambda: args.x.load() << 1,
        lambda: args.count / 2,
        lambda: args.x + 1,
        lambda: args.x.at(args.short),
        lambda: args.count.at(1),
        lambda: args.words.store(args.x.load()),
        lambda: k.loop(args.count, args.x.load()).close(args.short),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_zeros_keep_their_sign(k: FunctionBuilder) -> None:
    assert [k.constant("float", zero).name for zero in (0.0, -0.0)] == ["0x0000000000000000", "0x8000000000000000"]


def test_what_is_called_is_declared_once(k: FunctionBuilder) -> None:
    k.args.x.store(k.minimum(k.args.count, k.minimum(k.args.count, 3)).to("float"))
    assert module(k, FunctionBuilder("other", AVX2)).count("declare i64 @llvm.umin.i64(i64, i64)") == 1


def test_a_job_has_all_of_its_fields_and_no_others() -> None:
    assert list(JOB.pack(count=2, rows=64, scale=1.0)) == [64, 2, 0x3F800000]
    for fields in ({"rows": 0, "count": 1}, {"rows": 0, "count": 1, "scale": 1.0, "more": 2}):
        with refused(ValueError):
            JOB.pack(**fields)
