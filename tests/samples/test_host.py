"""The host's own path of ingest and loading, over a null device: how often it touches bytes and Python, and no time."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtool.core.cache.pages import newest_meta
from kvtool.core.cache.store import Store
from kvtool.core.fusion.placing import _Block
from samples.tools import host

CHUNKS, TOKENS = 256, 64
MOST_TRANSACTIONS = 30  # for 1,000 chunks of 125 files: one a batch of 64 chunks, and some of the beginning
MOST_CALLS = 320  # of functions in Python for a chunk of two layers that is ingested
MOST_READ_CALLS = 66  # for a record that is loaded


@pytest.fixture
def device() -> host.NullDevice:
    made = host.NullDevice.of("tiny", batch=64 * TOKENS)
    made.keep(8, TOKENS)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create_or_open(tmp_path / "store") as made:
        yield made


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls of functions in Python, by whether they are kvtool's, in this thread and in those that it starts."""
    calls = Counter[str]()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call" and "kvtool/core" in frame.f_code.co_filename:  # type: ignore[attr-defined]
            calls["all"] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_batch_is_one_transaction(store: Store, device: host.NullDevice) -> None:
    files, path = host.files_of(CHUNKS * TOKENS, TOKENS), store.environment.generation / "data.mdb"
    with path.open("rb") as file:
        before = newest_meta(path, file).transaction
        host.ingest(store, device, files)
        assert (newest_meta(path, file).transaction - before) * 1000 <= MOST_TRANSACTIONS * CHUNKS
    assert store.stats()["documents"] == len(files)


def test_a_byte_is_taken_over_once_and_copied_by_lmdb_only(store: Store, device: host.NullDevice) -> None:
    """Records are the memory that a pass has put the numbers in. Copies of them in Python or numpy would be traced."""
    files, size = host.files_of(CHUNKS * TOKENS, TOKENS), CHUNKS * TOKENS * device.token_bytes
    device.asked = 0
    tracemalloc.start()
    try:
        host.ingest(store, device, files)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert device.taken == 2 * size  # for the sensitivities once more: of two layers, which are all
    assert device.asked <= 1.1 * device.taken  # with the room for headers and digests
    assert peak < size / 2


def test_calls_of_python(store: Store, device: host.NullDevice) -> None:
    files = host.files_of(CHUNKS * TOKENS, TOKENS)
    with counted() as calls:
        host.ingest(store, device, files)
    assert 100 < calls["all"] / CHUNKS <= MOST_CALLS
    plan, cache = host.plan_of(files), device.cache(CHUNKS * TOKENS + host.QUESTION)
    with counted() as calls:
        host.load(store, device, plan, cache, workers=1)
    assert 10 < calls["all"] / (CHUNKS * device.layer_count) <= MOST_READ_CALLS


def test_layers_are_read_into_the_same_memory(
    store: Store, device: host.NullDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory for each would cost as much again as reading and checking: a fault for each page."""
    files, made, block = host.files_of(8 * TOKENS, TOKENS), Counter[int](), _Block.of
    host.ingest(store, device, files)
    monkeypatch.setattr(_Block, "of", lambda size, pinned: made.update([size]) or block(size, pinned))
    device.device, plan = "cpu", host.plan_of(files)
    read = host.load(store, device, plan, device.cache(plan.length), workers=1)
    assert read <= sum(made.elements()) * device.layer_count <= 1.5 * read
