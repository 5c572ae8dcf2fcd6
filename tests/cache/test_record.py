"""The envelope of a record, and the name of a chunk: a read returns what was written, and nothing else (laws 7, 8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.cache import record
from kvtool.core.cache.identity import ID_BYTES, chunk_id, ids_digest
from kvtool.core.cache.record import Kind, KVHeader, decode_record, encode_record, seal, unseal
from kvtool.core.errors import DamagedError
from tests.wording import refused

counts = st.integers(0, 2**32 - 1)
headers = st.builds(
    KVHeader,
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    kv_heads=counts,
    tokens=counts,
    head_dim_k=counts,
    head_dim_v=counts,
    level=st.from_regex(r"[A-Za-z0-9._+-]{1,16}", fullmatch=True).filter(lambda level: level != "raw"),
    layer=counts,
)
payloads = st.lists(st.binary(max_size=300), max_size=4)


@given(st.binary(max_size=40), headers, payloads)
def test_round_trip(key: bytes, header: KVHeader, parts: list[bytes]) -> None:
    data = encode_record(key, header, parts)
    assert len(data) == record.OVERHEAD_BYTES + sum(map(len, parts))
    found, payload = decode_record(key, data)
    assert found == header
    assert bytes(payload) == b"".join(parts)


def test_every_bit_and_every_cut() -> None:
    data = encode_record(b"key", KVHeader("float16", 1, 2, 3, 4, "raw", 5), [bytes(12), bytes(16)])
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(DamagedError):
            decode_record(b"key", changed)
    for cut in range(len(data)):
        for part in (data[:cut], data[cut + 1 :], data + data[: cut + 1]):
            with pytest.raises(DamagedError):
                decode_record(b"key", part)


@given(st.binary(max_size=300))
def test_any_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_record(b"key", data)


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_other_key(key: bytes, other: bytes) -> None:
    data = seal(key, Kind.DOCUMENT, b"text")
    if key == other:
        assert bytes(unseal(other, Kind.DOCUMENT, data)) == b"text"
    else:
        with refused(DamagedError):
            unseal(other, Kind.DOCUMENT, data)


def test_other_kind() -> None:
    with refused(DamagedError):
        unseal(b"k", Kind.FILE, seal(b"k", Kind.DOCUMENT, b""))
    with refused(DamagedError):
        decode_record(b"k", seal(b"k", Kind.DOCUMENT, b""))


def test_newer_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORD_VERSION", 9)
    data = seal(b"k", Kind.FILE, b"")
    monkeypatch.undo()
    with refused(DamagedError, numbers=True):
        unseal(b"k", Kind.FILE, data)


def test_raw_sizes_must_fit_the_shape() -> None:
    header = KVHeader("float32", 2, 3, 4, 5, "raw", 0)
    assert header.raw_bytes == 2 * 3 * 9 * 4
    with refused(ValueError, numbers=True):
        encode_record(b"k", header, [bytes(215)])


def test_a_signed_header_that_claims_too_much() -> None:
    """Check that a record whose digest is right and whose shape is absurd (2**96 elements) still is only damage."""
    huge = KVHeader("float32", 2**32 - 1, 2**32 - 1, 2**32 - 1, 1, "x", 0)
    data = bytearray(encode_record(b"k", huge, [b"abcd"]))
    data[8:11] = b"raw"
    data[-16:] = record._digest(b"k", [bytes(data[:-16])])
    with refused(DamagedError):
        decode_record(b"k", data)


@pytest.mark.parametrize("level", ["", "a b", "x" * 17, "é", "a/b", "a\n"])
def test_bad_levels(level: str) -> None:
    with refused(ValueError):
        KVHeader("float16", 1, 1, 1, 1, level, 0)


def test_bad_header_fields() -> None:
    for dtype, tokens in (("int8", 1), ("float16", -1)):
        with refused(ValueError):
            KVHeader(dtype, 1, tokens, 1, 1, "raw", 0)


def test_payload_is_aligned_in_the_record_and_writable_where_the_record_is() -> None:
    assert record.HEADER_BYTES % 64 == 0
    data = bytearray(encode_record(b"k", KVHeader("float16", 1, 1, 1, 1, "x", 0), [b"abcd"]))
    payload = decode_record(b"k", data)[1]
    assert not payload.readonly
    assert decode_record(b"k", bytes(data))[1].readonly


def test_typed_parts_are_taken_as_bytes() -> None:
    part = memoryview(bytes(8)).cast("H")
    data = encode_record(b"k", KVHeader("float16", 1, 2, 2, 2, "raw", 0), [part, part])
    assert decode_record(b"k", data)[1].nbytes == 16


def test_golden_record() -> None:
    """Check bytes that are on disk: a change of the layout needs a new RECORD_VERSION."""
    data = encode_record(b"key", KVHeader("bfloat16", 1, 1, 1, 2, "raw", 3), [b"kk", b"vvvv"])
    assert data.hex() == (
        "6b76720001010100726177000000000000000000000000000300000001000000"
        "0100000001000000020000000000000006000000000000000000000000000000"
        "6b6b767676766bf5128743ba4063d3f375bda99fc60a"
    )


FIELDS: dict[str, Any] = {
    "namespace": "team",
    "model_fingerprint": "f" * 64,
    "lead_in": b"l" * 20,
    "token_ids": [1, 2, 3],
}


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("namespace", ""),
        ("namespace", "tean"),
        ("namespace", "시험"),
        ("model_fingerprint", "f" * 63),
        ("model_fingerprint", "f" * 63 + "e"),
        ("lead_in", b""),
        ("lead_in", b"l" * 19 + b"m"),
        ("token_ids", []),
        ("token_ids", [1, 2]),
        ("token_ids", [1, 3, 2]),
        ("token_ids", [1, 2, 3, 0]),
        ("token_ids", [2**32 - 1, 2, 3]),
    ],
)
def test_every_field_counts(field: str, other: object) -> None:
    assert chunk_id(**FIELDS) != chunk_id(**{**FIELDS, field: other})


def test_fields_do_not_run_into_each_other() -> None:
    first = chunk_id(namespace="ab", model_fingerprint="c", lead_in=b"", token_ids=[])
    assert first != chunk_id(namespace="a", model_fingerprint="bc", lead_in=b"", token_ids=[])
    assert first != chunk_id(namespace="ab", model_fingerprint="", lead_in=b"c", token_ids=[])
    ids = chunk_id(namespace="", model_fingerprint="", lead_in=b"", token_ids=[0x61])
    assert ids != chunk_id(namespace="", model_fingerprint="", lead_in=b"a\0\0\0", token_ids=[])


def test_sequences_of_any_kind_are_equal() -> None:
    assert ids_digest((1, 2, 3)) == ids_digest([1, 2, 3]) == ids_digest(range(1, 4))
    assert len(ids_digest([])) == len(chunk_id(**FIELDS)) == ID_BYTES
    assert ids_digest([1, 2, 3]) != ids_digest([1, 2])


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_that_do_not_fit(bad: list[int]) -> None:
    with refused(ValueError):
        chunk_id(**{**FIELDS, "token_ids": bad})


def test_golden_id() -> None:
    """Check names that are on disk: a change of the encoding needs a new ID_VERSION."""
    assert chunk_id(**FIELDS).hex() == "3114556d85348dd3f8a56416ab19bbc8f02a7742"
    assert ids_digest([1, 2, 3]).hex() == "7a1da53788b323278e746d22f15674f5a804a4bc"
