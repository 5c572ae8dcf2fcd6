"""Law 6 across machines: records that one arithmetic made are used by another, kept in either's format or a third.

The model is one that was published in bfloat16: both machines have the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from kvtool.core.cache.tables import Place
from kvtool.core.fusion.prefix_cache import NewCheckpoint, StoredPrefix, encoded, fuse_prefix
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.gate import check_invariants, compare_prefix
from tests.families import tiny_model
from tests.fusion.making import CHUNKS, IDLE, LOSSLESS, PREFIX, QUESTION, Case, decoder_of, exact_logits, rms
from tests.fusion.test_prefix_cache import GOES_ON, plan_of
from tests.session.test_gate import LONG

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek-v2", "gpt-oss"]
PAIRS = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")]
# RMS against the same weights computed in float32 throughout; logits have a standard deviation of about 3.
NOISE = 0.25


@cache
def machine(name: str, arithmetic: str, kept: str) -> Case:
    model = tiny_model(name, "bfloat16")
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, arithmetic))
    model.config.dtype = getattr(torch, arithmetic)
    return Case(name, arithmetic, Decoder(decoder_of(model).loaded, kv_dtype=getattr(torch, kept)))


def off(name: str, ids: tuple[int, ...], logits: torch.Tensor) -> float:
    return rms(logits.cpu() - exact_logits(name, "bfloat16", ids))


@pytest.mark.parametrize(("arithmetic", "kept"), PAIRS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_holds(name: str, arithmetic: str, kept: str) -> None:
    """Recomputing everything is full prefill, recomputing nothing is `reuse`, whatever format is between."""
    here = machine(name, arithmetic, kept)
    plan = here.plan()
    reused = here.fuse(plan, SELECTORS["reuse"]()).logits
    assert all(kv.dtype == getattr(torch, kept) for kv in here.kept.values())
    for mode in SELECTORS:
        if (everything := LOSSLESS.get(mode)) is not None:
            assert off(name, tuple(plan.ids), here.fuse(plan, everything).logits) <= NOISE
        if (none := IDLE.get(mode)) is not None:
            assert torch.equal(here.fuse(plan, none).logits, reused)


@pytest.mark.parametrize(("arithmetic", "kept"), PAIRS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gate_lets_the_pair_through(name: str, arithmetic: str, kept: str) -> None:
    decoder = machine(name, arithmetic, kept).decoder
    verdict = check_invariants(decoder, "f", PREFIX, LONG, QUESTION)
    verdict.enforce()
    assert {check.arithmetic for check in verdict.checks} == {f"{arithmetic} on {decoder.device}"}


@pytest.mark.parametrize("mode", ["reuse", "epic", "prefix"])  # whose rows no rounded score chooses
@pytest.mark.parametrize("name", FAMILIES)
def test_what_another_made_serves_as_well(name: str, mode: str) -> None:
    """The records of a bfloat16 machine on a float32 one and the other way round: as far off as rounding is."""
    fine, rough = machine(name, "float32", "bfloat16"), machine(name, "bfloat16", "bfloat16")
    selector = SELECTORS[mode]()
    plans = [case.plan(CHUNKS[:2]) for case in (fine, rough)]
    own = fine.fuse(plans[0], selector).logits
    for here, there in ((fine, rough), (rough, fine)):
        borrowed = Case(name, here.dtype, here.decoder, dict(there.kept))
        assert rms(borrowed.fuse(borrowed.plan(CHUNKS[:2]), selector).logits - own) <= NOISE


# ---- models that keep states -----------------------------------------------------------------------------------------

MACHINES = ("float32", "bfloat16")
BEGINNING = (PREFIX, *CHUNKS[:2])


class Shelf:
    """State checkpoints as a machine stores them, rows in bfloat16."""

    def __init__(self, stretches: Sequence[NewCheckpoint]) -> None:
        kept = ((one.id, *part) for one in stretches for part in encoded(one.parts, torch.bfloat16))
        self.parts = {(stretch, place): payload for stretch, place, payload in kept}
        self.found = StoredPrefix(tuple(one.id for one in stretches), tuple(one.info for one in stretches))

    def read(self, stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(self.parts[stretch, place]))


@pytest.mark.parametrize("name", GOES_ON)
def test_a_beginning_that_another_has_answered_is_gone_on_from(name: str) -> None:
    decoders = {arithmetic: machine(name, arithmetic, "bfloat16").decoder for arithmetic in MACHINES}
    ids, plan = tuple(b"%d" % number for number in range(len(BEGINNING))), plan_of(CHUNKS[:2])
    nothing = StoredPrefix(ids, (None,) * len(ids))
    made = {
        arithmetic: Shelf(fuse_prefix(decoder, plan, Prefix(), nothing, _nothing).new)
        for arithmetic, decoder in decoders.items()
    }
    for here, there in (MACHINES, MACHINES[::-1]):
        decoder, shelf = decoders[here], made[there]
        chained = fuse_prefix(decoder, plan, Prefix(), shelf.found, shelf.read)
        assert chained.fused.tokens.fresh == len(QUESTION)
        assert rms(chained.fused.logits - decoder.prefill(plan.ids)[0]) <= NOISE
        formats = {  # each state is in what the layer itself computes it in here: none is converted on the way
            number: {key: (state.dtype, state.shape) for key, state in layer.states().items()}
            for number, layer in enumerate(chained.fused.cache.buffers)
            if number in decoder.state_forms
        }
        assert formats == decoder.state_forms
        by = decoders[there].loaded.arithmetic
        assert {info.arithmetic for info in shelf.found.infos if info} == {by}
        measured = compare_prefix(decoder, BEGINNING, shelf.found, by, shelf.read, NOISE)
        assert measured is not None
        assert measured[0].passed
        assert 0 < measured[1] < 0.1


def _nothing(stretch: bytes, place: Place) -> memoryview:
    raise AssertionError("nothing is stored yet")
