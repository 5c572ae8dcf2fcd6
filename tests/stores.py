"""Stores for tests: small ones of deterministic records, without a model; and those that the commands make of a tiny
model, as fixtures. Nothing here imports torch before a fixture needs it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.identity import chunk_id
from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer

LAYERS, TOKENS, HEADS, DIM = 2, 8, 2, 16
LEAD_IN = b"lead-in digest------"
MANIFEST = {"identity": {"fingerprint": "model", "model": "tiny"}}
IDENTITY = {
    "model": "tiny",
    "fingerprint": "model",
    "dtype": "bfloat16",
    "prefix": [1, 2],
    "answer_header": [3],
    "lead_in": {"mode": "warm", "ids": [1]},
    "split": {"method": "semantic", "max_tokens": 256, "min_tokens": 0},
    "system": "",
    "namespace": "",
}
_END = 1  # the token


def noise(label: str, size: int) -> bytes:
    """Return the same bytes for the same label, anywhere."""
    return hashlib.shake_128(label.encode("utf-8", "surrogatepass")).digest(size)


def ids_of(label: str, tokens: int = TOKENS) -> tuple[int, ...]:
    data = noise(label, 2 * tokens)
    return tuple(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))


def id_of(label: str, tokens: int = TOKENS) -> bytes:
    return chunk_id(namespace="", model_fingerprint="model", lead_in=LEAD_IN, token_ids=ids_of(label, tokens))


def header_of(layer: int = 0, level: str = "raw", tokens: int = TOKENS, dim: int = DIM) -> KVHeader:
    return KVHeader("bfloat16", HEADS, tokens, dim, dim, level, layer)


def payload_of(label: str, layer: int, level: str = "raw", dim: int = DIM) -> list[bytes]:
    half = HEADS * TOKENS * dim * 2
    return [noise(f"{label}/{level}/{layer}/{part}", half) for part in "kv"]


def records_of(label: str, level: str = "raw", dim: int = DIM) -> list[bytes]:
    return [
        encode_record(id_of(label), header_of(layer, level, dim=dim), payload_of(label, layer, level, dim))
        for layer in range(LAYERS)
    ]


def info_of(label: str) -> ChunkInfo:
    return ChunkInfo(ids_of(label), LEAD_IN, LAYERS)


def put(writer: Writer, label: str, level: str = "raw", dim: int = DIM) -> ChunkRef:
    writer.put_chunk(id_of(label), info_of(label), level, records_of(label, level, dim))
    return ChunkRef(id_of(label), 0, len(label), TOKENS)


def add_file(writer: Writer, path: str, labels: Sequence[str], dim: int = DIM) -> None:
    refs, start = list[ChunkRef](), 0
    for label in labels:
        refs.append(replace(put(writer, label, dim=dim), start=start, end=start + len(label)))
        start += len(label) + 1
    entry = FileEntry(path, 1, 2, "digest", "settings", (path,))
    writer.commit_file(entry, [DocumentEntry(path, "text", " ".join(labels), tuple(refs))])


def make_store(path: Path, files: int = 2, chunks: int = 2, dim: int = DIM) -> Path:
    with Store.create_or_open(path) as store, store.writer() as writer:
        writer.set_manifest({"model": "tiny"})
        for number in range(files):
            add_file(writer, f"f{number}", [f"f{number}.{chunk}" for chunk in range(chunks)], dim)
    return path


def check_file(store: Store, path: str, chunks: int = 2, dim: int = DIM) -> None:
    """Check that everything about a file of :func:`make_store` reads back, byte for byte."""
    document = store.document(path)
    assert store.file(path) is not None
    assert document is not None
    assert [ref.chunk_id for ref in document.chunks] == [id_of(f"{path}.{chunk}") for chunk in range(chunks)]
    for chunk in range(chunks):
        label = f"{path}.{chunk}"
        assert store.chunk_info(id_of(label)) == info_of(label)
        for layer in range(LAYERS):
            found = store.read_kv(id_of(label), "raw", layer)
            assert found is not None
            assert found[0] == header_of(layer, dim=dim)
            assert bytes(found[1]) == b"".join(payload_of(label, layer, dim=dim))


def new_store(path: Path, files: int = 3) -> Path:
    """Make a store that can be pushed: it names a model."""
    make_store(path, files)
    with Store.open(path) as store, store.writer() as writer:
        writer.set_manifest(MANIFEST)
    return path


def add(store: Store, path: str, *labels: str) -> None:
    with store.writer() as writer:
        add_file(writer, path, labels)


def forget(store: Store, *paths: str) -> None:
    with store.writer() as writer:
        for path in paths:
            writer.remove_file(path)
        writer.collect()


def sources_of(path: Path) -> list[str]:
    with Store.open(path) as store:
        return store.sources()


def bytes_of(path: Path) -> list[tuple[bytes, str, int, bytes]]:
    """Payloads of all records, with their chunk, level and layer."""
    with Store.open(path) as store:
        keys = [(chunk, level) for chunk in store.chunk_ids() for level in store.levels(chunk)]
        places = [(chunk, level, layer) for chunk, level in keys for layer in range(LAYERS)]
        return [(*place, bytes(store.read_kv(*place)[1])) for place in places]  # type: ignore[index]


# ---- stores that the commands make of a tiny model ----


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from tests.families import save_tiny

    torch.set_num_threads(1)
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def built(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and the store of it, which has answered a question. Leave it as it is."""
    from tests.cli.working import CHUNKS, QUESTION, SHORT, kvtool, write_corpus

    folder = tmp_path_factory.mktemp("built")
    write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        kvtool("ingest", folder / "corpus", "--store", folder / "store", "--model", tiny, *CHUNKS).fine()
        kvtool("query", QUESTION, "--store", folder / "store", *SHORT).fine()
    return folder


@pytest.fixture
def corpus(built: Path) -> Path:
    return built / "corpus"


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "store", tmp_path / "store"))


@pytest.fixture
def fresh(tiny: Path, tmp_path: Path) -> Any:
    """`fresh(folder)`: ingest into `tmp_path/fresh` with the short lead-in; more arguments as given."""
    from tests.cli.working import CHUNKS, PREFIX, Done, kvtool

    def ingest(*paths: object, store: Path = tmp_path / "fresh") -> Done:
        return kvtool("ingest", *paths, "--store", store, "--model", tiny, *CHUNKS, *PREFIX, "--json")

    return ingest


@pytest.fixture(scope="session")
def plain_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exact records only. Leave it as it is."""
    from tests.compress.making import make_plain

    return make_plain(tiny, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def fitted_store(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every lossy level, too. Leave it as it is."""
    from tests.compress.making import make_fitted

    return make_fitted(plain_store, tmp_path_factory.mktemp("fitted"))


@pytest.fixture
def plain(plain_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_store, tmp_path / "plain"))


@pytest.fixture
def fitted(fitted_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fitted_store, tmp_path / "fitted"))


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every answer be this text: a tiny random model says nothing that could be a sentence."""
    from kvtool.core.model import generate
    from kvtool.core.model.tokens import encode
    from tests.families import tiny_tokenizer

    def say(text: str) -> None:
        ids, positions = [*encode(tiny_tokenizer(), text), _END], dict[Any, int]()

        def next_token(logits: Any, sampling: Any) -> int:
            positions[sampling.draw] = positions.get(sampling.draw, -1) + 1
            return ids[positions[sampling.draw]]

        monkeypatch.setattr(generate, "next_token", next_token)

    return say
