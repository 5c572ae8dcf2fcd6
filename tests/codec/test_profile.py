"""Profiles: fitted alike every time, exact both ways, and refused when anything about their bytes is off."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from kvtool.core.codec.fit import TABLES, WHOLE_LAYER, default_groups
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import Layout, Profile
from kvtool.core.codec.rans.tables import BLOCK
from kvtool.core.errors import DamagedError, StoreFormatError
from tests.codec.synthetic import LAYERS, STEP, Model, assert_same_profile, fitted, model, profile
from tests.wording import refused

KINDS = [(2, 24, 1), (2, 24, 2), (2, 32, 1), (2, 32, 2)]  # heads, channels of a head (C = 48 and C = 64), groups


@pytest.fixture(params=KINDS, ids=str, scope="module")
def fit(request: pytest.FixtureRequest) -> tuple[Model, Profile]:
    heads, dim, groups = request.param
    return model(heads, dim), profile(heads, dim, groups=groups)


@pytest.fixture
def made(fit: tuple[Model, Profile]) -> Profile:
    return fit[1]


def coded_blocks(of: Profile, level: str, layer: int) -> np.ndarray[Any, Any]:
    return of.layout.places(of.active[NESTED.index(level), layer])


@pytest.mark.slow
def test_the_same_sample_gives_the_same_profile(fit: tuple[Model, Profile]) -> None:
    source, made = fit
    assert fitted(source, made.layout.groups).data == made.data
    assert fitted(source, made.layout.groups, tokens=399).digest != made.digest


def test_there_and_back(fit: tuple[Model, Profile]) -> None:
    (source, made), layout = fit, fit[1].layout
    for layer in range(LAYERS):
        sides = source.sides(layer, 50, seed=7)
        grouped = (sides - made.means[layer, :, None]).view(2, 50, layout.groups, layout.size).transpose(1, 2)
        numbers = grouped @ made.forward(layer)
        for at, level in enumerate(NESTED):
            back = made.backward(layer, level, torch.float32)[0][:, :, : layout.size]
            again = (numbers / 3**at) @ back
            assert (again - grouped).abs().max() < 2e-5 * grouped.abs().max()
            assert not made.backward(layer, level, torch.float32)[0][:, :, layout.size :].any()


def test_a_step_costs_the_same_in_every_direction(fit: tuple[Model, Profile]) -> None:
    (source, made), layout = fit, fit[1].layout
    for side in range(2):
        for layer in range(LAYERS):
            whole = source.sensitivity[side, layer].double()
            mixed = 0.8 * whole + 0.2 * torch.diag(whole.diagonal())
            for group in range(layout.groups):
                own = slice(group * layout.size, (group + 1) * layout.size)
                basis = made.basis[layer, side, group].double()
                costs = basis @ mixed[own, own] @ basis.T
                assert torch.allclose(costs.diagonal(), torch.full((layout.size,), STEP**2).double(), rtol=0.02)
                assert (costs - torch.diag(costs.diagonal())).abs().max() < 0.02 * STEP**2


def test_coefficients_are_uncorrelated_and_the_widest_comes_first(fit: tuple[Model, Profile]) -> None:
    (source, made), layout = fit, fit[1].layout
    sides = source.sides(1, 400)  # what it was fitted to
    grouped = (sides - made.means[1, :, None]).view(2, 400, layout.groups, layout.size).transpose(1, 2)
    numbers = (grouped @ made.forward(1)).double()
    spread = numbers.transpose(-1, -2) @ numbers / 400
    size = spread.diagonal(dim1=-2, dim2=-1).sqrt()
    assert (size[..., 1:] < size[..., :-1] * 1.02).all()
    correlations = spread / size[..., None] / size[..., None, :] - torch.eye(layout.size)
    assert correlations.abs().mean() < 0.01


def test_finer_levels_code_what_coarser_ones_do(made: Profile) -> None:
    active = made.active.astype(int)
    assert (active[:-1] >= active[1:]).all()
    for layer in range(LAYERS):
        for level in NESTED:
            places = coded_blocks(made, level, layer)
            assert len(places) % 2 == 0
            assert (np.diff(places) > 0).all()
            assert (places % BLOCK == 0).all()
            assert not len(places) or places[-1] < made.layout.stride


def test_what_carries_nothing_is_not_coded() -> None:
    low = profile(2, 32, 20)
    assert low.active.max() == 1
    assert len(coded_blocks(low, "1", 0)) == 2
    few = fitted(model(2, 32, 20), step=60.0)
    assert not few.active.any()
    assert len(coded_blocks(few, "4", 0)) == 0


def test_all_tables_can_be_named(made: Profile) -> None:
    assert len(made.tables) <= TABLES + 48
    assert (made.fine_ids % 3 == made.fine_ids.min() % 3).all()
    assert made.fine_ids.min() > made.ids.max()  # tables of refinements are their own
    low, high = made.tables.bounds
    assert (low[made.fine_ids] == -1).all()
    assert (high[made.fine_ids + 2] == 1).all()


def test_wide_layers_take_a_transform_a_head() -> None:
    assert default_groups([(2, 0, WHOLE_LAYER // 2)] * 3) == 1
    assert default_groups([(2, 0, WHOLE_LAYER)] * 3) == 2


@given(groups=st.integers(1, 4), size=st.integers(1, 100), data=st.data())
def test_places_are_even_in_number_and_within_the_row(groups: int, size: int, data: st.DataObject) -> None:
    layout = Layout(groups, size)
    most = layout.padded // BLOCK
    active = np.array(data.draw(st.lists(st.integers(0, most), min_size=2 * groups, max_size=2 * groups)), np.uint8)
    places = layout.places(active)
    assert len(places) % 2 == 0
    assert len(places) - active.sum() in (0, 1)
    assert (np.diff(places) > 0).all()
    wanted = {layout.start(group // groups, group % groups) + BLOCK * n for group in range(2 * groups)
              for n in range(active[group])}  # fmt: skip
    assert wanted <= set(places.tolist())
    assert set(places.tolist()) <= set(range(0, layout.stride, BLOCK))
    assert layout.stride % 64 == 0


def test_bytes_and_back(made: Profile) -> None:
    again = Profile.from_bytes(memoryview(made.data))
    assert_same_profile(again, made)
    assert again.data == made.data
    assert len(made.digest) == 16
    assert again.about == {"model": "synthetic", "step": STEP}
    rebuilt = Profile(again.means, again.basis, again.active, again.ids, again.fine_ids, again.tables, again.about)
    assert rebuilt.data == made.data


SOUND = profile(2, 24).data
HEADER = 8 + int.from_bytes(SOUND[:8], "little")


def refused_or_another(data: bytes) -> bool:
    """Whether it is refused; if not, it must have another name than the sound one, so no record names it."""
    try:
        read = Profile.from_bytes(data)
    except (DamagedError, StoreFormatError):
        return True
    assert data == SOUND or read.digest != profile(2, 24).digest
    for layer in range(read.layers):
        for level in NESTED:
            assert len(coded_blocks(read, level, layer)) % 2 == 0
    return False


def test_every_cut_is_refused() -> None:
    for size in [*range(0, HEADER + 40), *range(HEADER + 40, len(SOUND), 499), len(SOUND) - 1]:
        assert refused_or_another(SOUND[:size])
    assert refused_or_another(SOUND + b"\0")


def test_every_changed_byte_of_the_header() -> None:
    refused = 0
    for place in range(HEADER):
        for value in {SOUND[place] ^ 1, SOUND[place] ^ 128, 0, ord("9"), ord('"'), ord("{")} - {SOUND[place]}:
            refused += refused_or_another(SOUND[:place] + bytes([value]) + SOUND[place + 1 :])
    assert refused > 2 * HEADER


@pytest.mark.slow
def test_changed_bytes_of_the_parts() -> None:
    dice = random.Random(3)
    for _ in range(1000):
        data = bytearray(SOUND)
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(HEADER, len(data))] = dice.randrange(256)
        refused_or_another(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert refused_or_another(data)
    assert refused_or_another(len(data).to_bytes(8, "little") + data)


def rewritten(parts: dict[str, torch.Tensor | None], metadata: dict[str, str] | None = None) -> bytes:
    """The sound profile with other parts; None: without it."""
    there = load(SOUND)
    for name, part in parts.items():
        there.pop(name, None)
        if part is not None:
            there[name] = part.contiguous()
    about = json.dumps({"model": "synthetic"})
    whole: bytes = save(there, {"kvtool_profile": "1", "about": about} if metadata is None else metadata)
    return whole


PARTS = load(SOUND)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_parts_of_another_type_or_shape(name: str) -> None:
    part = PARTS[name]
    assert not refused_or_another(rewritten({name: part}))
    types = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.uint16,
             torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64} - {part.dtype}  # fmt: skip
    others: list[torch.Tensor | None] = [
        None,
        part[None],
        part[..., None],
        part.reshape(-1),
        part[:0],
        part[..., :0],
        part[..., :-1],
        part.reshape(-1)[0],
        torch.cat([part, part], -1),
        *(part.float().to(one) for one in types if one is not torch.float8_e4m3fn),
        part.float().nan_to_num().clamp(0, 1).to(torch.float8_e4m3fn),
    ]
    if name != "tables":  # of which there may be any number
        others.append(torch.cat([part, part]))
    if part.dtype.itemsize == 2:
        others += [part.view(one) for one in (torch.int16, torch.uint16, torch.bfloat16, torch.float16) if one in types]
    for other in others:
        with pytest.raises(DamagedError):
            Profile.from_bytes(rewritten({name: other}))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("means", (1, 0, 3), float("nan")),
        ("means", (1, 0, 3), float("inf")),
        ("basis", (0, 1, 0, 2, 2), float("nan")),
        ("basis", (0, 1, 0, 2, 2), float("-inf")),
        ("active", (0, 0, 0), 3),
        ("active", (3, 2, 1), 255),
        ("ids", (0, 0, 0), len(PARTS["tables"])),
        ("fine_ids", (2, 2, 5), len(PARTS["tables"]) - 2),
        ("fine_ids", (0, 0, 0), 65535),
        ("tables", (0, 128), 0),
        ("tables", (len(PARTS["tables"]) - 1, 0), 2048),
    ],
)
def test_numbers_that_cannot_be(name: str, place: tuple[int, ...], value: float) -> None:
    changed = PARTS[name].clone()
    if changed.dtype is torch.uint16:
        changed.numpy()[place] = value
    else:
        changed[place] = value
    with pytest.raises(DamagedError):
        Profile.from_bytes(rewritten({name: changed}))


@pytest.mark.parametrize("about", ["{", "[1]", "null", "[" * 100_000, None], ids=lambda about: str(about)[:50])
def test_metadata_that_is_not_ours(about: str | None) -> None:
    metadata = {} if about is None else {"about": about}
    for format_ in ({}, {"kvtool_profile": "1"}):
        with pytest.raises(DamagedError):
            Profile.from_bytes(rewritten({}, metadata | format_))


def test_another_format() -> None:
    with refused(StoreFormatError, numbers=True) as caught:
        Profile.from_bytes(rewritten({}, {"kvtool_profile": "2", "about": "{}"}))
    assert caught.value.exit_code == 12


def test_a_header_that_is_no_object() -> None:
    for header in (b"[]", b"1", b'{"__metadata__":1}', b'{"__metadata__":{"about":1}}', b"[" * 100_000, b"\xff\xfe"):
        assert refused_or_another(len(header).to_bytes(8, "little") + header)
    assert refused_or_another(b"\xff" * 8 + SOUND[8:])


def test_a_transform_that_has_no_inverse() -> None:
    basis: Any = PARTS["basis"].clone()
    basis[1, 0, 0, 5] = 0
    flat = Profile.from_bytes(rewritten({"basis": basis}))
    flat.forward(0)
    with pytest.raises(DamagedError):
        flat.forward(1)
