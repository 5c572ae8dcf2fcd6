"""Measured losses of codec levels, on their way from store to store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import HEAD
from kvtool.core.remote.mirror import open_shared
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.remote.signing import Trust
from kvtool.core.remote.values import join_codec
from tests.cache.making import make_store

MINE, THEIRS, NONE = "aa" * 16, "bb" * 16, "00" * 16

OWN = Trust(mine=True)


def loss(nats: float) -> dict[str, float]:
    return {"kl_answer": nats, "questions": 8.0}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'shared'}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(make_store(tmp_path / "store")) as opened:
        with opened.writer() as writer:
            writer.set_manifest({"identity": {"fingerprint": "model", "model": "tiny"}})
        yield opened


def know(store: Store, codec: dict[str, Any]) -> None:
    with store.writer() as writer:
        writer.set_codec_state(codec)


def seen(url: str) -> dict[str, Any]:
    with open_shared(url) as tier:
        return tier.codec_state()


def test_what_is_measured_later_reaches_the_store_in_front(store: Store, blobs: Blobs) -> None:
    first = {"profile": MINE, "losses": {MINE: {"2": loss(0.5)}}}
    know(store, first)
    push(store, blobs)
    assert seen(blobs.url) == first
    later = {"profile": THEIRS, "losses": {THEIRS: {"3": loss(0.001)}}}
    know(store, later)
    push(store, blobs)
    assert seen(blobs.url) == later


@pytest.mark.parametrize(
    "own", [{}, {"profile": "", "losses": {}}, {"profile": "", "losses": {NONE: {"1": loss(0.1)}}}]
)
def test_a_push_without_a_profile_leaves_the_tiers(own: dict[str, Any], store: Store, blobs: Blobs) -> None:
    digest = hashlib.blake2b(b"profile", digest_size=16).digest()
    know(store, {"profile": digest.hex(), "losses": {digest.hex(): {"2": loss(0.001)}}})
    with store.writer() as writer:
        writer.put_profile(digest, b"profile")
    push(store, blobs)
    with store.writer() as writer:
        writer.drop_profiles([digest])
        writer.drop_level(store.chunk_ids(), "raw")
    know(store, own)
    push(store, blobs)
    there = seen(blobs.url)
    assert there["profile"] == digest.hex()
    assert there["losses"] == {digest.hex(): {"2": loss(0.001)}} | own.get("losses", {})
    head = blobs.get([HEAD])
    push(store, blobs)
    assert blobs.get([HEAD]) == head


def test_a_pulled_store_keeps_its_own_and_learns_the_rest(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    know(store, {"profile": MINE, "losses": {MINE: {"1": loss(0.1), "3": loss(0.3)}}})
    push(store, blobs)
    place = tmp_path / "other"
    with Store.open(make_store(place)) as other:
        with other.writer() as writer:
            writer.set_manifest(store.manifest())
        know(other, {"profile": MINE, "losses": {MINE: {"1": loss(0.2)}}})
        pull(place, blobs, trust=OWN)
        assert other.codec_state() == {"profile": MINE, "losses": {MINE: {"1": loss(0.2), "3": loss(0.3)}}}


@pytest.mark.parametrize(
    ("mine", "theirs", "joined"),
    [
        ({}, {}, {}),
        ({}, {"profile": MINE, "losses": {MINE: {"2": 1}}}, {"profile": MINE, "losses": {MINE: {"2": 1}}}),
        ({"profile": MINE, "losses": {MINE: {"2": 1}}}, {}, {"profile": MINE, "losses": {MINE: {"2": 1}}}),
        (  # another profile's losses are true of its own records only
            {"profile": MINE, "losses": {MINE: {"2": 1}}},
            {"profile": THEIRS, "losses": {THEIRS: {"2": 9, "3": 8}}},
            {"profile": MINE, "losses": {MINE: {"2": 1}, THEIRS: {"2": 9, "3": 8}}},
        ),
        (
            {"profile": MINE, "losses": {MINE: {"2": 1}, NONE: {"1": 4}}},
            {"profile": "", "losses": {NONE: {"1": 5, "4": 6}}},
            {"profile": MINE, "losses": {MINE: {"2": 1}, NONE: {"1": 4, "4": 6}}},
        ),
        ({"profile": ""}, {"profile": "", "losses": {NONE: {"1": 5}}}, {"profile": "", "losses": {NONE: {"1": 5}}}),
        ({"profile": MINE}, {"named": True}, {"profile": MINE, "named": True, "losses": {}}),
    ],
)
def test_two_codec_states(mine: dict[str, Any], theirs: dict[str, Any], joined: dict[str, Any]) -> None:
    assert join_codec(mine, theirs) == joined
