"""Levels 1 to 4, and the paper's: any input comes back within the error that the record states (law 7).

Records of the paper's scheme are read at levels 1 to 4, too: they are made so without a profile.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import DTYPES, Encoded, no_profiles
from kvtool.core.codec.cachegen import shipped
from kvtool.core.codec.levels import NESTED, NO_PROFILE, base_level
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.rans.coder import symbols_of
from kvtool.core.codec.rans.tables import ESCAPE, ZERO, TableSet, in_order
from kvtool.core.codec.record import Record
from kvtool.core.codec.transform import encode_levels
from kvtool.core.errors import DamagedError, KvtoolError
from tests.codec.synthetic import (
    KV,
    LAYERS,
    Model,
    changed,
    encode_nested,
    encoded,
    fitted,
    model,
    numbers_of,
    profile,
    relative,
    shelf,
)
from tests.wording import refused

ROUNDING = 1 + 1e-5  # of the stated error, a float32 sum


@pytest.fixture(params=["whole", "heads", "anchor"])
def of(request: pytest.FixtureRequest) -> Profile | None:
    """A profile; None: the paper's scheme."""
    return None if request.param == "anchor" else profile(groups=1 if request.param == "whole" else 2)


def decoded(item: Encoded, level: str, of: Profile | None = None, *, layer: int = 0) -> KV:
    made = CODECS[level].decode([item], layer, shelf(of))[0]
    if of is None:
        again = CODECS[f"cachegen-{level}"].decode([item], layer)[0]
        assert all(torch.equal(*pair) for pair in zip(made, again, strict=True))
    return made


def check_law(
    item: Encoded, level: str, exact: KV, of: Profile | None = None, *, layer: int = 0
) -> tuple[float, float]:
    """Law 7 for one record; the errors it states."""
    coded = Record.parse(item.payload)
    for stated, made, side in zip(coded.errors, decoded(item, level, of, layer=layer), exact, strict=True):
        assert made.shape == side.shape
        assert made.dtype == side.dtype
        assert relative(made, side) <= stated * ROUNDING
        assert relative(made, side) >= stated * 0.999 - 1e-9  # and says no more than is true
    return coded.errors


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_within_the_stated_error(of: Profile | None, dtype: str) -> None:
    for layer in (0, 2):
        kv = model().kv(layer, 60, dtype=DTYPES[dtype])
        before = (0.0, 0.0)
        for level in NESTED:
            item = encoded(*kv, [level], of, layer)[level]
            errors = check_law(item, level, kv, of, layer=layer)
            assert all(error < 1 for error in errors)
            assert all(coarse > fine for coarse, fine in zip(errors, before, strict=True))
            before = errors


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 11, 257])
def test_any_number_of_tokens(of: Profile | None, tokens: int) -> None:
    kv = model().kv(1, tokens, dtype=torch.bfloat16)
    for level, item in encoded(*kv, NESTED, of, 1).items():
        errors = check_law(item, level, kv, of, layer=1)
        assert max(errors) < 1.1


@pytest.mark.parametrize("number", [0.0, 1.0, -3.14159, 250.7])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_number_for_all(of: Profile | None, dtype: str, number: float) -> None:
    side = torch.full((2, 20, 24), number, dtype=DTYPES[dtype])
    for level, item in encoded(side, side, NESTED, of, 0).items():
        check_law(item, level, (side, side), of)
        if of is None:
            assert relative(decoded(item, level)[0], side) < 0.005
            assert len(item.payload) < 2500  # no information to encode, and escapes add none


def test_numbers_far_outside(of: Profile | None) -> None:
    """They are escapes; each comes back as well as any other number does."""
    dice = torch.Generator().manual_seed(4)
    for size in (30.0, 3e3):
        sides = model().sides(0, 80, seed=2)
        plain = encoded(*model().heads_of(sides), ["1"], of, 0)["1"]
        for side in range(2):
            rows, columns = (torch.randint(most, (12,), generator=dice) for most in (80, 48))
            sides[side, rows, columns] += size * (2 * torch.rand(12, generator=dice) - 1)
        kv = model().heads_of(sides)
        for level, item in encoded(*kv, NESTED, of, 0).items():
            check_law(item, level, kv, of)
        item = encoded(*kv, ["1"], of, 0)["1"]
        escapes = Record.parse(item.payload).escapes
        if size == 3e3 and of is not None:  # anchors' steps grow with the largest
            assert len(escapes.places) + len(escapes.marked) > 0
        wrong = (decoded(item, "1", of)[0] - kv[0]).abs().max()
        if of is not None:  # the step is the profile's
            usual = (decoded(plain, "1", of)[0] - model().heads_of(model().sides(0, 80, seed=2))[0]).abs().max()
            assert wrong < 1.5 * usual


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("groups", [1, 2])
def test_another_text_uses_what_the_profile_never_saw(groups: int, dtype: str) -> None:
    low, full = model(2, 64, 20), Model(2, 64, seed=1)
    of = profile(2, 64, 20, groups)
    assert of.active.max() * 32 < of.layout.padded
    for level in NESTED:
        usual = low.kv(0, 60, dtype=DTYPES[dtype])
        sides = full.sides(0, 60, seed=3) - torch.from_numpy(full.means[0]).float() + of.means[0, :, None]
        other = full.heads_of(sides, DTYPES[dtype])
        inside, outside = (encoded(*kv, NESTED, of)[level] for kv in (usual, other))
        check_law(inside, level, usual, of)
        check_law(outside, level, other, of)
        assert len(Record.parse(outside.payload).escapes.places) > (100 if level == "1" else 0)
        wrong = in_steps(of, level, decoded(outside, level, of), other)
        assert wrong.square().mean() < (1.1 if dtype == "float32" else 1.6) / 12
        assert max(Record.parse(outside.payload).errors) < 0.9


def in_steps(of: Profile, level: str, made: KV, exact: KV, layer: int = 0) -> torch.Tensor:
    """Errors of the coefficients, in steps of a level: what a profile keeps even."""
    wrong = torch.stack([one.float() - other.float() for one, other in zip(made, exact, strict=True)])
    layout = of.layout
    grouped = wrong.transpose(1, 2).reshape(2, -1, layout.groups, layout.size).transpose(1, 2)
    steps: torch.Tensor = grouped @ of.forward(layer) / 3 ** NESTED.index(level)
    return steps


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_several_chunks_in_one_call(of: Profile | None, dtype: str) -> None:
    other = profile(groups=2 if of is profile(groups=1) else 1)
    sources = [of, None, of, other]
    for level in ("1", "3"):
        items, kvs = [], []
        for number, source in enumerate(sources):
            kvs.append(model().kv(2, 5 + 13 * number, seed=number, dtype=DTYPES[dtype]))
            items.append(encoded(*kvs[-1], NESTED if number % 2 else [level], source, 2)[level])
        found = shelf(other, of)
        together = CODECS[level].decode(items, 2, found)
        assert len(together) == len(items)
        for item, pair, kv in zip(items, together, kvs, strict=True):
            alone = CODECS[level].decode([item], 2, found)[0]
            for one, single, side in zip(pair, alone, kv, strict=True):
                assert one.shape == side.shape
                assert one.dtype == side.dtype
                assert relative(one, single) < (1e-6 if dtype == "float32" else 0.003)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_several_chunks_with_what_the_profile_never_saw(groups: int) -> None:
    of = profile(2, 64, 20, groups)
    kvs = [Model(2, 64, seed=1).kv(0, tokens, seed=tokens) for tokens in (7, 30, 12)]
    kvs.insert(1, model(2, 64, 20).kv(0, 9))
    items = [encoded(*kv, ["1"], of)["1"] for kv in kvs]
    assert [len(Record.parse(item.payload).escapes.places) > 50 for item in items] == [True, False, True, True]
    for pair, item, kv in zip(CODECS["1"].decode(items, 0, shelf(of)), items, kvs, strict=True):
        for made, alone, exact in zip(pair, decoded(item, "1", of), kv, strict=True):
            assert relative(made, alone) < 1e-6
            assert relative(made, exact) <= 1.001 * max(Record.parse(item.payload).errors)


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_all_layers_in_one_call(of: Profile | None, dtype: str) -> None:
    profiles = shelf(of)
    kvs = [model().kv(layer, 40, dtype=DTYPES[dtype]) for layer in range(LAYERS)]
    kvs[1][0][0, 3] *= 50  # beyond what the tables know
    for levels in ([level] for level in NESTED), [NESTED]:
        for some in levels:
            found = [encoded(*kv, some, of, layer) for layer, kv in enumerate(kvs)]
            for level in some:
                items = [made[level] for made in found]
                one_by_one = [CODECS[level].decode([item], layer, profiles)[0] for layer, item in enumerate(items)]
                for kv, wanted in zip(CODECS[level].decode_layers(items, profiles), one_by_one, strict=True):
                    assert all(torch.equal(*pair) for pair in zip(kv, wanted, strict=True))


def test_layers_of_a_chunk_have_one_length() -> None:
    items = [encoded(*model().kv(layer, 40 + layer), ["2"], profile(), layer)["2"] for layer in range(2)]
    kvs = CODECS["2"].decode_layers(items, shelf(profile()))
    assert [keys.shape[1] for keys, _ in kvs] == [40, 41]
    of_another = [encoded(*model().kv(0, 40), ["2"], profile(), 0)["2"]] * (LAYERS + 1)
    with refused(DamagedError):
        CODECS["2"].decode_layers(of_another, shelf(profile()))


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [None, 20])
def test_refined_or_alone(rank: int | None, groups: int, dtype: str) -> None:
    """Through all coarser levels, or at once: the same numbers and the same tensors, bit for bit."""
    of = profile(2, 32, rank, groups)
    kv = model(2, 32, rank).kv(1, 70, seed=5, dtype=DTYPES[dtype])
    far = torch.zeros(2, 70, 32, dtype=DTYPES[dtype])
    far[0, 3, 7], far[1, 69, 31], far[0, 0, 0] = 500.0, -90.0, 2.0
    kv = (kv[0] + far, kv[1] - far)
    chain = encoded(*kv, NESTED, of, 1)
    for level in NESTED:
        alone = encoded(*kv, [level], of, 1)[level]
        assert Record.parse(alone.payload).base == 0
        assert Record.parse(chain[level].payload).base == (0 if level == NESTED[-1] else int(level) + 1)
        assert np.array_equal(numbers_of([chain[level]], of, layer=1), numbers_of([alone], of, layer=1))
        assert Record.parse(chain[level].payload).errors == Record.parse(alone.payload).errors
        for one, other in zip(
            decoded(chain[level], level, of, layer=1), decoded(alone, level, of, layer=1), strict=True
        ):
            assert torch.equal(one, other)
        check_law(chain[level], level, kv, of, layer=1)


def test_each_level_is_the_rounded_finer_one() -> None:
    of, kv = profile(), model().kv(0, 90)
    numbers = [numbers_of([encoded(*kv, [level], of)[level]], of) for level in NESTED]
    for fine, coarse in pairwise(numbers):
        assert np.array_equal(coarse, np.rint(fine / 3).astype(np.int16))


def test_which_level_refines_which() -> None:
    of, kv = profile(), model().kv(0, 30)

    def bases(levels: list[str], stored: tuple[str, ...] = ()) -> dict[str, str | None]:
        made = encode_nested(*kv, 0, levels, of, bases=dict.fromkeys(stored, b""))
        return {level: base_level(level, b"".join(parts)) for level, parts in made.items()}

    assert bases(["1", "3"]) == {"1": None, "3": None}
    assert bases(["2", "3"]) == {"2": "3", "3": None}
    assert bases(["1"], ("2",)) == {"1": "2"}
    assert bases(["4"], ("1", "2", "3")) == {"4": None}
    assert [base_level(level, b"".join(encode_nested(*kv, 0, [level])[level])) for level in NESTED] == [None] * 4
    made = Record.parse(b"".join(CODECS["cachegen-1"].encode_layers([kv], of)[0]))  # a profile is left unchanged
    assert (made.profile, made.base) == (NO_PROFILE, 0)
    assert CODECS["2"].encode_layers([kv], of)[0] == encode_nested(*kv, 0, ["2"], of)["2"]


@pytest.mark.slow
def test_a_base_and_what_refines_it_take_little_more_than_the_finest() -> None:
    some = model(2, 32)
    of = fitted(some, tokens=3000, step=0.1)
    kv = some.kv(0, 1500, dtype=torch.bfloat16)
    alone = len(encoded(*kv, ["1"], of)["1"].payload)
    sizes = {level: len(item.payload) for level, item in encoded(*kv, NESTED, of).items()}
    assert alone < sum(sizes.values()) < 1.06 * alone
    assert sizes["4"] < alone / 3
    single = [len(encoded(*kv, [level], of)[level].payload) for level in NESTED]
    assert single == sorted(single, reverse=True)
    assert sum(sizes.values()) < 0.7 * sum(single)


@pytest.mark.slow
def test_a_profile_takes_less_than_none() -> None:
    some = model(2, 32)
    kv = some.kv(0, 1000, dtype=torch.bfloat16)
    of = fitted(some, tokens=2000, step=0.3)
    with_it, without = (encoded(*kv, ["1"], one)["1"] for one in (of, None))
    assert len(with_it.payload) < kv[0].nbytes * 2 / 3.5
    assert len(with_it.payload) < len(without.payload) < kv[0].nbytes * 2 / 1.8


def test_the_papers_thirds() -> None:
    kv = model().kv(0, 50)
    steps = []
    for made in CODECS["cachegen-2"].encode_layers([kv] * 6):
        steps.append(Record.parse(b"".join(made)).steps[0])
    assert np.allclose(np.array(steps) / steps[0], [1, 1, 2, 2, 3, 3])


def test_columns_whose_tables_know_only_zero() -> None:
    some = model(2, 32, 20)
    of = fitted(some, step=3.0)
    assert not of.active[-1].any()
    kv = some.kv(0, 40)
    chain = encoded(*kv, NESTED, of)
    assert Record.parse(chain["4"].payload).columns == 0
    for level in NESTED:
        check_law(chain[level], level, kv, of)


def test_a_table_that_knows_escapes_only() -> None:
    rows = np.zeros((2, 256), np.uint16)
    rows[0, ESCAPE] = rows[1, ZERO - 5] = 2048
    columns = in_order(np.resize(np.array([0, 1], np.uint16), 64), TableSet(rows))
    numbers = np.array([np.resize(row, 64) for row in ([0, -5], [-1, -4], [32766, -6])], np.int16)
    ((symbols, escapes),) = symbols_of(numbers[None], [columns])
    assert (symbols[:, :2] == ESCAPE).tolist() == [[True, False], [True, True], [True, True]]
    assert len(escapes) == 5 * 32
    assert symbols[0, 1] == ZERO - 5


def test_what_is_beyond_int16_ends_there(of: Profile | None) -> None:
    keys, values = model().kv(0, 40)
    exact = keys.clone()
    keys[1, 7, 5] = 1e6
    for level, item in encoded(keys, values, NESTED, of, 0).items():
        check_law(item, level, (keys, values), of)
        made = decoded(item, level, of)[0]
        assert torch.isfinite(made).all()
        if of is not None:
            others = [token for token in range(40) if token != 7]
            usual = decoded(encoded(exact, values, [level], of)[level], level, of)[0]
            assert torch.equal(made[:, others], usual[:, others])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3), tokens=st.integers(1, 25), dim=st.integers(1, 40), seed=st.integers(0, 99),
    level=st.sampled_from(NESTED),
    dtype=st.sampled_from(sorted(DTYPES)), size=st.sampled_from([1e-3, 1.0, 50.0]),
)  # fmt: skip
def test_law_7_of_any_shape_without_a_profile(
    heads: int, tokens: int, dim: int, seed: int, level: str, dtype: str, size: float
) -> None:
    dice = torch.Generator().manual_seed(seed)
    keys, values = (size * torch.randn(2, heads, tokens, dim, generator=dice)).to(DTYPES[dtype])
    check_law(encoded(keys, values, [level])[level], level, (keys, values))


def test_views_and_their_strides() -> None:
    of = profile()
    keys, values = model().kv(0, 40)
    for one in (of, None):
        whole = encode_nested(keys[:, 5:20].contiguous(), values[:, 5:20].contiguous(), 0, NESTED, one)
        assert whole == encode_nested(keys[:, 5:20], values[:, 5:20], 0, NESTED, one)


def check_damage(item: Encoded, level: str, of: Profile | None = None, *, layer: int = 0) -> None:
    with pytest.raises(DamagedError):
        decoded(item, level, of, layer=layer)


def test_a_profile_or_a_layer_that_is_not_the_records() -> None:
    kv = model().kv(0, 30)
    item = encoded(*kv, ["1"], profile())["1"]
    for found in (no_profiles, shelf(), shelf(profile(2, 32))):
        with pytest.raises(DamagedError):
            CODECS["1"].decode([item], 0, found)
    for layer in (-1, 3, 1000):
        check_damage(item, "1", profile(), layer=layer)
    for wrong in (profile(groups=2), profile(2, 32), fitted(model(), tokens=399)):
        for one in (item, encoded(*kv, NESTED, profile())["1"]):
            with pytest.raises(DamagedError):
                CODECS["1"].decode([one], 0, {one.payload[64:80]: wrong}.__getitem__)


def test_of_another_level_or_length() -> None:
    for of in (profile(), None):
        item = encoded(*model().kv(0, 30), ["2"], of)["2"]
        decoded(item, "2", of)
        for level in ("1", "3", "4"):
            check_damage(item, level, of)
        # A profile is as wide as a model's widest layer, so it takes a narrower one: what a record says of its shape is
        # under its digest, and held against the model's.
        narrower = [] if of else [(2, 30, 12)]
        for shape in ((2, 29, 24), (2, 31, 24), (2, 30, 25), (3, 30, 24), *narrower):
            check_damage(replace(item, shape=shape), "2", of)
            with pytest.raises(DamagedError):  # not saved by a sound one before it
                CODECS["2"].decode([item, replace(item, shape=shape)], 0, shelf(of))


def test_a_base_that_does_not_fit() -> None:
    """None, or of another level, length, profile or scheme."""
    of = profile()
    item = encoded(*model().kv(0, 30), NESTED, of)["1"]
    below = item.base
    assert below is not None
    decoded(item, "1", of)
    others = [encoded(*model().kv(0, tokens), ["2"], of)["2"] for tokens in (29, 31)]
    wrong = [None, replace(below, base=None), below.base, item, encoded(*model().kv(0, 30), ["1"], of)["1"]]
    wrong += [*others, *(replace(other, shape=(2, 30, 24)) for other in others)]
    wrong.append(changed(below, transformed=False, streams=Record.parse(below.payload).streams * 4))
    for another in (profile(groups=2), fitted(model(), tokens=399), None):
        wrong.append(encoded(*model().kv(0, 30), ["2"], another)["2"])
    for base in wrong:
        check_damage(replace(item, base=base), "1", of)


def test_a_base_of_other_rounding() -> None:
    of, kv = profile(), model().kv(0, 30)
    chain = encoded(*kv, ["1", "2"], of)
    other = encoded(kv[0] + 0.3 * torch.rand(kv[0].shape), kv[1], ["1", "2"], of)
    for one, base in ((chain, other), (other, chain)):
        with refused(DamagedError):
            decoded(replace(one["1"], base=base["2"]), "1", of)
    with pytest.raises(DamagedError):
        decoded(changed(chain["1"], base_check=0), "1", of)


def test_a_base_whose_empty_stream_would_do() -> None:
    """Nothing is coded at any level, so only the header says which level or length a record is of."""
    some = model(2, 32, 20)
    of, other = (fitted(some, step=step) for step in (60.0, 61.0))
    chain = encoded(*some.kv(0, 30), NESTED, of)
    assert not Record.parse(chain["1"].payload).columns
    decoded(chain["1"], "1", of)
    others = (encoded(*some.kv(0, 20), NESTED, of)["2"], encoded(*some.kv(0, 30), NESTED, other)["2"])
    for base in (chain["1"], chain["3"], chain["4"], *others):
        check_damage(replace(chain["1"], base=base), "1", of)


def test_a_transformed_record_among_those_without_a_profile() -> None:
    sound = encoded(*model().kv(0, 30), ["1"])["1"]
    streams = Record.parse(sound.payload).streams[:1]
    item = changed(sound, transformed=True, streams=streams, side=bytes(2 * 4 * 48 + 64))
    for items in ([sound, item], [item, sound]):
        with pytest.raises(DamagedError):
            CODECS["1"].decode(items, 0, shelf())


def test_side_information_that_does_not_fit() -> None:
    item = encoded(*model().kv(0, 30), ["1"])["1"]
    known = Record.parse(item.payload).side
    unknown = bytes([len(shipped())])
    for side in (known + b"\0", known[:-1], b"", known[:-1] + unknown, b"\xff" * len(known)):
        check_damage(changed(item, side=side), "1")


def test_marks_that_are_not_those_of_the_stream() -> None:
    of = profile()
    keys, values = model().kv(0, 30)
    keys[0, 3] += 400.0
    one, two = np.array([1], np.int16), np.array([1, 1], np.int16)
    for source in (of, None):
        item = encoded(keys, values, ["1"], source)["1"]
        escapes = Record.parse(item.payload).escapes
        assert len(escapes.marked)
        just_outside = 30 * 128 if source else 2 * 30 * 64
        for wrong in (
            replace(escapes, marked=escapes.marked[:-1]),
            replace(escapes, marked=np.append(escapes.marked, np.int16(1))),
            replace(escapes, marked=escapes.marked[:0]),
            replace(escapes, places=np.array([10**6], np.uint32), placed=one),
            replace(escapes, places=np.array([just_outside], np.uint32), placed=one),
            replace(escapes, places=np.array([5, 5], np.uint32), placed=two),
        ):
            check_damage(changed(item, escapes=wrong), "1", source)
    refining = encoded(*model().kv(0, 30), NESTED, of)["1"]  # which knows no marks
    escapes = Record.parse(refining.payload).escapes
    assert not len(escapes.marked)
    check_damage(changed(refining, escapes=replace(escapes, marked=one)), "1", of)


@pytest.mark.parametrize(
    ("level", "size"),
    [
        *((level, odd) for level in ("2", "cachegen-2") for odd in (np.inf, -np.inf, np.nan)),
        *(("cachegen-2", 1e18), ("cachegen-2", 1e37), ("2", 1e37)),
    ],
)
def test_numbers_that_cannot_be_coded_are_refused(level: str, size: float) -> None:
    keys, values = torch.randn(2, 2, 30, 16)
    keys[1, 2, 3] = 1.0
    with refused(KvtoolError):
        CODECS[level].encode_layers([(keys * size, values)], fitted(Model(2, 16)))


def test_without_a_profile_a_record_is_the_papers() -> None:
    kv = model().kv(0, 30)
    for level in NESTED:
        of, paper = CODECS[level], CODECS[f"cachegen-{level}"]
        ours, theirs = ([b"".join(parts) for parts in codec.encode_layers([kv] * 3)] for codec in (of, paper))
        assert ours == theirs
    with refused(KvtoolError):
        encode_levels([kv], ["1", "2"])
