"""A chunk's name depends on all of its identity, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from kvtool.core.cache.identity import ID_BYTES, chunk_id, ids_digest

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
    with pytest.raises(ValueError, match="token ids"):
        chunk_id(**{**FIELDS, "token_ids": bad})


def test_golden() -> None:
    """Check names that are on disk: a change of the encoding needs a new ID_VERSION."""
    assert chunk_id(**FIELDS).hex() == "3114556d85348dd3f8a56416ab19bbc8f02a7742"
    assert ids_digest([1, 2, 3]).hex() == "7a1da53788b323278e746d22f15674f5a804a4bc"
