"""Wrong data about a model's states under a right digest: detected, and computed again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtool.core.cache import tables
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import Place, StretchInfo, info_row, part_row
from kvtool.core.cache.tables import Row
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.prefix_cache import decode_part, encode_part, named_states
from kvtool.core.model.decoder import Decoder
from tests.chaos.hybrids import FIRST, SECOND, ask, asked, make_hybrid
from tests.cli.working import damages, kvtool
from tests.families import tiny_model
from tests.fusion.making import decoder_of, tokens

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(tiny_model("qwen3.5"))


def states_of(decoder: Decoder) -> Tensors:
    _, cache = decoder.prefill(tokens(9, 1))
    return {f"{what} {number}": state for (what, number), state in cache.buffers[0].states().items()}


def at(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda states: states | {name: change(states[name])}


WRONG: dict[str, Callable[[Tensors], Tensors]] = {
    "a name without a number": lambda states: states | {"recurrent": states["recurrent 0"]},
    "a number that is none": lambda states: states | {"recurrent x": states["recurrent 0"]},
    "a state too many": lambda states: states | {"recurrent 1": states["recurrent 0"]},
    "no window": lambda states: {name: state for name, state in states.items() if name != "conv 0"},
    "no recurrence": lambda states: {name: state for name, state in states.items() if name != "recurrent 0"},
    "nothing": lambda states: {},
    "a longer window": at("conv 0", lambda state: torch.cat([state, state], -1)),
    "a window of fewer channels": at("conv 0", lambda state: state[:, 1:]),
    "a flat window": at("conv 0", torch.Tensor.flatten),
    "a head too few": at("recurrent 0", lambda state: state[:, 1:]),
    "one number for all": at("recurrent 0", lambda state: state[:, :1, :1, :1]),
    "two prompts": at("recurrent 0", lambda state: torch.cat([state, state])),
    "what a separate chunk carries": lambda states: states | {"carried 0": states["recurrent 0"]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_states_that_are_no_layers(wrong: str, decoder: Decoder) -> None:
    sound = states_of(decoder)
    assert len(named_states(sound, decoder, 0)) == 2
    with pytest.raises(DamagedError):
        named_states(WRONG[wrong](sound), decoder, 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hostile"), FIRST)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def stretch_in(store: Path) -> tuple[bytes, StretchInfo]:
    with Store.open(store) as opened:
        found = opened.stretches()
    return max(((one, info) for one, info in found.items() if info.states), key=lambda pair: pair[1].start)


def put(store: Path, row: Row) -> None:
    table, key, value = row
    with Store.open(store) as opened:
        opened.environment.write(lambda transaction: transaction.put(table + key, value), 0)


def parts_of(store: Path, stretch: bytes, place: Place) -> Tensors:
    with Store.open(store) as opened:
        return {name: one.clone() for name, one in decode_part(opened.read_part(stretch, place)).items()}


def spoiled(parts: Tensors, number: float) -> Tensors:
    """The same with one number of each tensor in place of what it was."""
    for one in parts.values():
        one.view(-1)[0] = number
    return parts


PAYLOADS: dict[str, Callable[[Tensors], bytes]] = {
    "cut short": lambda states: encode_part(states)[:-64],
    "empty": lambda states: b"",
    "other sizes": lambda states: encode_part({name: state[:, 1:] for name, state in states.items()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_state_of_another_make_is_computed_again(payload: str, store: Path) -> None:
    whole = ask(store, SECOND).json
    stretch, info = stretch_in(store)
    layer = info.states[-1]
    wrong = PAYLOADS[payload](parts_of(store, stretch, ("state", layer)))
    put(store, part_row(stretch, ("state", layer), wrong))
    done = ask(store, SECOND)
    assert "damaged" in done.err
    assert "miss" in [chunk["status"] for chunk in done.json["chunks"]]
    assert done.json["answer"] == whole["answer"]
    again = ask(store, SECOND)
    assert "damaged" not in again.err  # it was stored anew
    assert [again.json[name] for name in ("answer", "chunks")] == [whole[name] for name in ("answer", "chunks")]


LAYERS: dict[str, Callable[[StretchInfo], StretchInfo]] = {
    "a layer too few": lambda info: replace(info, states=info.states[:-1]),
    "a layer too many": lambda info: replace(info, states=(*info.states, 9)),
    "no rows": lambda info: replace(info, rows=()),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_stretch_of_another_layer_count_is_computed_again(layers: str, store: Path) -> None:
    whole = ask(store, SECOND).json
    stretch, info = stretch_in(store)
    put(store, info_row(stretch, LAYERS[layers](info)))
    done = ask(store, SECOND)
    assert "miss" in [chunk["status"] for chunk in done.json["chunks"]]
    assert done.json["answer"] == whole["answer"]
    assert ask(store, SECOND).json["answer"] == whole["answer"]
    assert damages(store) == []


def test_a_layer_that_no_key_has_room_for_is_damage(store: Path, tmp_path: Path) -> None:
    stretch, info = stretch_in(store)
    text = info.to_bytes().replace(b'"states":[0', b'"states":[70000')
    broken = info_row(stretch, info)
    put(store, (tables.STRETCHES, broken[1], seal(stretch, Kind.STRETCH, text)))
    verified = kvtool("store", "verify", "--store", store)
    assert verified.code == 13
    assert "Traceback" not in verified.err
    kvtool("store", "export", tmp_path / "one.kvpack", "--store", store).fine()
    kvtool("store", "verify", "--repair", "--store", store)
    assert damages(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["state", "rows"])
def test_no_answer_is_made_of_what_is_no_number(side: str, number: float, store: Path) -> None:
    """Its digest is right. A state is looked at and computed again; rows are not, and what they make is refused."""
    whole = ask(store, SECOND).json
    stretch, info = stretch_in(store)
    for place in info.places:
        if place[0] == side:
            put(store, part_row(stretch, place, encode_part(spoiled(parts_of(store, stretch, place), number))))
    again = kvtool(*asked(store, SECOND, "prefix"))
    if side == "state":
        assert again.fine().json["answer"] == whole["answer"]
    else:
        again.failed(12, "no finite numbers")
    ask(store, SECOND, "full")
    assert damages(store) == []
