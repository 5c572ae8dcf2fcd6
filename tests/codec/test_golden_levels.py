"""Golden bytes of every lossy level and of a profile.

The input and the profile are dyadic numbers of few bits, so products, sums and the inverse are exact on any machine, in
whatever order they are taken. After a new format version, and only then: `python -m tests.codec.test_golden_levels`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import FORMAT as PROFILE_FORMAT
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.rans.tables import ALPHABET, ESCAPE, SLOTS, ZERO, TableSet
from kvtool.core.codec.record import FORMAT, Record
from tests.codec.synthetic import KV, assert_same_profile, encode_nested, item_of, shelf

FOLDER = Path(__file__).with_name("golden")
HEADS, TOKENS, DIM = 2, 12, 20
REFINED = NESTED[:-1]
TRANSFORMED = [*(f"level-{level}" for level in NESTED), *(f"refined-{level}" for level in REFINED)]
PLAIN = ["anchor-1", "anchor-3"]


def table(**frequencies: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """A row with these frequencies of numbers, `p` and `m` before them, or of the escape; zero has the rest."""
    row = np.zeros(ALPHABET, np.uint16)
    for name, frequency in frequencies.items():
        number = ESCAPE - ZERO if name == "escape" else int(name[1:]) * (-1 if name[0] == "m" else 1)
        row[ZERO + number] = frequency
    row[ZERO] = SLOTS - row.sum()
    return row


def handmade() -> Profile:
    """Four channels at a time are mixed by ones and minus ones, in steps that are powers of two."""
    four = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    basis = np.zeros((1, 2, HEADS, DIM, DIM))
    for start in range(0, DIM, 4):
        basis[..., start : start + 4, start : start + 4] = four * 2.0 ** -np.array([[2], [3], [3], [1]])
    basis[:, 1] /= 2
    means = (np.arange(2 * HEADS * DIM) % 17 - 8).reshape(1, 2, -1) / 4
    ids = np.zeros((4, 1, 128), np.uint16)
    ids[0, 0, :64:3] = 1  # K's, at the finest level
    ids[1, 0, 64:80] = 1
    fine_ids = np.full((3, 1, 128), 2, np.uint16)
    wide = {f"{sign}{number}": 60 for number in range(1, 13) for sign in "pm"}
    tables = [table(p1=100, m1=90, p2=9, m2=11, p3=3, m3=2, escape=4), table(**wide, escape=1)]
    tables += [table(p1=40, m1=40), table(p1=500, m1=600), table(p1=700, m1=700)]
    return Profile(
        means=torch.from_numpy(means).float(),
        basis=torch.from_numpy(basis).bfloat16(),
        active=np.array([[[1, 0, 1, 0]], [[1, 0, 1, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]], np.uint8),
        ids=ids,
        fine_ids=fine_ids,
        tables=TableSet(np.stack(tables)),
        about={"model": "golden"},
    )


def source() -> KV:
    """Quarters of steps from -7½ to 7½, fewer in later columns, a few far outside; each token once more, mirrored."""
    profile = handmade()
    noise = np.frombuffer(hashlib.shake_128(b"kvtool").digest(2 * HEADS * TOKENS // 2 * DIM), np.uint8).astype(int)
    steps = ((noise.reshape(2, HEADS, TOKENS // 2, DIM) % 61 - 30) >> (np.arange(DIM) // 5)) / 4
    steps[:, 1] = np.where(noise.reshape(steps.shape)[:, 1] % 16 == 0, steps[:, 1], 0)  # groups that are not coded
    steps[0, 0, 0, 2], steps[1, 0, 5, 19], steps[1, 1, 3, 7] = 130.25, -90.0, 40.5
    steps = np.concatenate([steps, -steps], 2)
    sides = (steps @ profile.basis[0].double().numpy()).transpose(0, 2, 1, 3).reshape(2, TOKENS, -1)
    keys, values = (torch.from_numpy(sides).float() + profile.means[0, :, None]).view(2, TOKENS, HEADS, DIM)
    return keys.transpose(0, 1), values.transpose(0, 1)


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.v{PROFILE_FORMAT if name == 'profile' else FORMAT}.bin"


def stored(name: str) -> bytes:
    return file_of(name).read_bytes()


def noted(name: str) -> str:
    """Committed digests: of the profile, of the numbers that a record holds."""
    return str(json.loads((FOLDER / "digests.json").read_text())[name])


def written(profile: Profile) -> dict[str, bytes]:
    kv = source()
    out = {}
    for level in NESTED:
        out[f"level-{level}"] = b"".join(CODECS[level].encode_layers([kv], profile)[0])
    for level, parts in encode_nested(*kv, 0, NESTED, profile).items():
        if level in REFINED:
            out[f"refined-{level}"] = b"".join(parts)
    for level in ("1", "3"):
        out[f"anchor-{level}"] = b"".join(encode_nested(*kv, 0, [level])[level])
    return out


def committed(name: str, like: torch.Tensor) -> Encoded:
    kind, level = name.split("-")
    coarse = str(int(level) + 1)
    base = None
    if kind == "refined":
        base = committed(f"refined-{coarse}" if coarse in REFINED else f"level-{coarse}", like)
    return item_of(stored(name), like, base)


def decoded(name: str) -> KV:
    like = torch.empty((HEADS, TOKENS, DIM))
    profile = Profile.from_bytes(stored("profile"))
    return CODECS[name[-1]].decode([committed(name, like)], 0, shelf(profile))[0]


def digest_of(kv: KV) -> str:
    return hashlib.blake2b(b"".join(side.contiguous().numpy().tobytes() for side in kv), digest_size=16).hexdigest()


def test_a_profile_is_written_as_it_was() -> None:
    assert handmade().data == stored("profile")
    assert handmade().digest.hex() == noted("profile")


def test_a_profile_is_read_as_it_was() -> None:
    assert_same_profile(Profile.from_bytes(stored("profile")), handmade())


@pytest.mark.parametrize("name", [*TRANSFORMED, *PLAIN])
def test_records_are_written_as_they_were(name: str, machine: str) -> None:
    """But for the last bit of the errors that they state: float32 sums, which not every CPU adds in the same order."""
    profile = Profile.from_bytes(stored("profile")) if name in TRANSFORMED else handmade()
    made, old = (Record.parse(data) for data in (written(profile)[name], stored(name)))
    assert made.errors == pytest.approx(old.errors, rel=1e-6)
    assert b"".join(dataclasses.replace(made, errors=old.errors, base_check=old.base_check).pack()) == stored(name)


@pytest.mark.parametrize("name", [*TRANSFORMED, *PLAIN])
def test_records_are_read_as_they_were(name: str, machine: str) -> None:
    assert digest_of(decoded(name)) == noted(name)


def test_the_header() -> None:
    for name in [*TRANSFORMED, *PLAIN]:
        data, coded = stored(name), Record.parse(stored(name))
        kind, level = name.split("-")
        assert data[:4] == b"kvg" + bytes([FORMAT])
        transformed = kind != "anchor"
        assert data[4:8] == bytes([transformed, 0, int(level), int(level) + 1 if kind == "refined" else 0])
        assert struct.unpack_from("<2I", data, 8) == (TOKENS, len(coded.streams[0].states) and coded.columns)
        words = [len(stream.words) for stream in coded.streams]
        assert struct.unpack_from("<4I", data, 16) == (*words, *[0] * (4 - len(words)))
        escapes = coded.escapes
        counts = len(escapes.places), len(escapes.marked), coded.base_check
        assert struct.unpack_from("<4I", data, 32) == (*counts, len(coded.side))
        assert struct.unpack_from("<4f", data, 48) == (*coded.steps, *coded.errors)
        assert data[64:80].hex() == (noted("profile") if transformed else "00" * 16)
        sizes = [2 * count + 4 * 64 for count in words]
        assert len(data) == 80 + sum(sizes) + len(coded.side) + 6 * counts[0] + 2 * counts[1]


def test_all_that_a_record_may_hold_is_here() -> None:
    coded = {name: Record.parse(stored(name)) for name in [*TRANSFORMED, *PLAIN]}
    assert len(coded["level-1"].escapes.places) > 3
    assert len(coded["level-1"].escapes.marked) > 1
    assert len(coded["refined-1"].escapes.places) > 3
    assert not coded["level-4"].columns
    assert len(coded["anchor-1"].escapes.marked) > 0
    assert len(coded["anchor-1"].streams) == 4
    assert {one.transformed for one in coded.values()} == {True, False}


def _write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in {"profile": handmade().data, **written(handmade())}.items():
        file_of(name).write_bytes(data)
    digests = {"profile": handmade().digest.hex()}
    digests |= {name: digest_of(decoded(name)) for name in [*TRANSFORMED, *PLAIN]}
    (FOLDER / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    _write()
