"""The gate lets correct models through and stops broken ones, with numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.lossless import Raw
from kvtool.core.errors import GateError
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.rope import Rotary
from kvtool.core.session.gate import _Prompts, check_invariants
from kvtool.core.session.identity import ConformanceCheck, ConformanceResult
from tests.fusion.making import CHUNKS, DTYPES, MOE, NAMES, PREFIX, QUESTION, case, new_case, tokens
from tests.laws import mutants

Mutant = Callable[[pytest.MonkeyPatch], None]
LONG = (CHUNKS[1], CHUNKS[3], tokens(300, 9))  # one is longer than what the gate looks at


def table_of_other_positions(patch: pytest.MonkeyPatch) -> None:
    """Cached keys are moved as if every position were the double of what the model takes it for."""
    table = Rotary.table
    patch.setattr(Rotary, "table", lambda self, positions: table(self, positions * 2))


def no_rotation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rotary, "rotate", lambda self, keys, table, layer: keys.clone())


def lossy_level(patch: pytest.MonkeyPatch) -> None:
    class Coarse(Raw):
        def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
            return super().encode(keys, values.bfloat16().to(torch.float8_e4m3fn).to(values.dtype))

    patch.setitem(CODECS, "raw", Coarse("raw"))


# The laws that each one must break, in every dtype. A loader one position off is seen in float32 only: in bfloat16 it
# changes the logits of some models no more than rounding does.
BROKEN: list[tuple[Mutant, set[int]]] = [
    (mutants.rotation_of_wrong_sign, {4}),
    (table_of_other_positions, {4}),
    (no_rotation, {4}),
    (mutants.unrotation_off_by_one, {4}),
    (mutants.keys_rotated_twice, {3}),
    (mutants.chunks_see_their_own_future, {3, 4}),
    (lossy_level, {7}),
]
EVERY_BROKEN = [(broken, laws, dtype) for broken, laws in BROKEN for dtype in DTYPES]
EVERY_BROKEN += [
    (broken, {1, 3}, "float32") for broken in (mutants.positions_off_by_one, mutants.unrotation_off_by_one)
]
# Law 5 catches it in bfloat16 too; these random models hardly look at what comes later.
EVERY_BROKEN += [(mutants.rows_see_the_future, {3}, "float32")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_passes(name: str, dtype: str) -> None:
    verdict = check_invariants(case(name, dtype).decoder, "f", PREFIX, LONG, QUESTION)
    assert [check.law for check in verdict.checks] == [1, 1, 3, 4, 7]
    assert verdict.passed
    verdict.enforce()
    # With room to spare: other machines round otherwise. (Measured: 1.9e-6 and 0.019.) A mixture of experts in bfloat16
    # has none: a rounded router score may choose another expert, and the first turn that is allowed ends the search.
    spare = 1 if name in MOE and dtype == "bfloat16" else 2
    assert all(check.difference <= check.tolerance / spare for check in verdict.checks)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "granite", "phi3", "smollm3", "qwen3-moe"])
@pytest.mark.parametrize(
    ("broken", "laws", "dtype"), EVERY_BROKEN, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_broken_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, broken: Mutant, laws: set[int]
) -> None:
    decoder = new_case(name, dtype).decoder  # made whole: some of these it would refuse at once
    broken(monkeypatch)
    verdict = check_invariants(decoder, "f", PREFIX, LONG, QUESTION)
    assert not verdict.passed
    assert laws <= {check.law for check in verdict.checks if not check.passed}
    with pytest.raises(GateError) as caught:
        verdict.enforce()
    for check in verdict.checks:
        assert check.passed or f"law {check.law} ({check.name}): {check.difference:.3g}" in caught.value.message
    assert "--fusion full" in caught.value.hint


def test_one_unlucky_prompt_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision; in float32 nothing but a fault can differ."""
    distance, seen = _Prompts.distance, []

    def unlucky(self: _Prompts, selector: Selector, count: int, turn: int = 0) -> float:
        seen.append(turn)
        return distance(self, selector, count, turn) if turn else 0.3

    monkeypatch.setattr(_Prompts, "distance", unlucky)
    assert check_invariants(case("mixtral", "bfloat16").decoder, "f", PREFIX, LONG, QUESTION).passed
    assert seen == [0, 1] * 3
    assert not check_invariants(case("mixtral").decoder, "f", PREFIX, LONG, QUESTION).passed


def test_numbers_that_are_not_finite_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Rotary, keys: torch.Tensor, table: RopeTables, layer: int) -> torch.Tensor:
        return torch.full_like(keys, float("nan"))

    monkeypatch.setattr(Rotary, "rotate", broken)
    verdict = check_invariants(new_case("llama").decoder, "f", PREFIX, LONG, QUESTION)
    assert not verdict.passed
    assert any(check.difference == float("inf") for check in verdict.checks)
    assert ConformanceResult.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


@pytest.mark.parametrize("chunks", [LONG[:1], [tokens(1, 3)], [tokens(5, 3)] * 4], ids=["one", "one token", "equal"])
@pytest.mark.parametrize("prefix", [PREFIX, ()], ids=["prefix", "no prefix"])
def test_few_short_or_equal_chunks(prefix: tuple[int, ...], chunks: list[tuple[int, ...]]) -> None:
    assert check_invariants(case("llama").decoder, "f", prefix, chunks, QUESTION).passed


def test_a_verdict_survives_json() -> None:
    checks = (
        ConformanceCheck(1, "blend 100 %", 1e-6, 1e-3, "float32 on cpu"),
        ConformanceCheck(4, "keys moved by 137", 0.7, 1e-3, "float32 on cpu"),
    )
    verdict = ConformanceResult("fingerprint", checks)
    row = json.loads(json.dumps(verdict.to_json()))
    assert row["passed"] is False
    assert [check["passed"] for check in row["checks"]] == [True, False]
    assert ConformanceResult.from_json(row) == verdict
