"""A store of a model whose keys and values differ in shape, through everything that keeps, encodes and sends them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.levels import NESTED
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, kvtool, write_corpus
from tests.compress.making import chunks_in, coded_in, damages, decoded, rows, run
from tests.families import KINDS, save_tiny

LEVELS = ("lossless", *NESTED)


# Latents; and heads that differ from layer to layer, where the last layers keep nothing.
FAMILIES = {"youtu": [(1, 16, 48)] * 4, "gemma4-shared": [(2, 16, 16), (2, 32, 32)]}


@pytest.fixture(scope="module", params=FAMILIES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every level and a profile; leave it as it is."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        model = save_tiny(request.param, folder / "model")
        corpus = write_corpus(folder / "in", 1, 4)
        kvtool("ingest", corpus, "--store", folder / "store", "--model", model, *CHUNKS, *PREFIX).fine()
        run(folder / "store", *LEVELS, fit=True, fit_prompts=2)
        run(folder / "store", "2", keep=0.5)
    return folder / "store"


@pytest.mark.slow
def test_a_record_has_the_shape_of_its_layer(stored: Path) -> None:
    shapes = next(shapes for name, shapes in FAMILIES.items() if name in str(stored))
    with Store.open(stored) as store:
        for chunk in map(bytes.fromhex, chunks_in(stored)):
            info = store.chunk_info(chunk)
            assert info.layers == len(shapes)
            for layer, (heads, key_dim, value_dim) in enumerate(shapes):
                found = store.read_kv(chunk, "raw", layer)
                header, payload = found
                assert (header.kv_heads, header.head_dim_k, header.head_dim_v) == (heads, key_dim, value_dim)
                assert len(payload) == 2 * heads * (key_dim + value_dim) * len(info.token_ids)


def assert_within(path: Path, chunk: str, level: str) -> None:
    exact, made, coded = decoded(path, chunk, "raw"), decoded(path, chunk, level), coded_in(path, level)
    for layer, sides in enumerate(zip(exact.layers, made.layers, strict=True)):
        for one, other, stated in zip(*sides, coded[chunk, layer].errors, strict=True):
            assert one.shape == other.shape
            off = float((other.double() - one.double()).norm() / one.double().norm())
            assert 0 < off <= stated * (1 + 1e-5) < 1  # it is stated in 32 bits


@pytest.mark.some(1)
def test_every_level_loses_what_it_states(stored: Path) -> None:
    assert damages(stored) == []
    chunk = chunks_in(stored)[0]
    exact = decoded(stored, chunk, "raw")
    for level in NESTED:
        assert_within(stored, chunk, level)
    same = zip(exact.layers, decoded(stored, chunk, "lossless").layers, strict=True)
    assert all(torch.equal(a, b) for one, other in same for a, b in zip(one, other, strict=True))


@pytest.mark.some(1)
def test_it_is_given_and_taken(stored: Path, tmp_path: Path) -> None:
    pack, path = tmp_path / "one.kvpack", tmp_path / "taken"
    kvtool("store", "export", pack, "--store", stored).fine()
    kvtool("store", "import", pack, "--store", path, "--model", stored.parent / "model").fine()
    assert chunks_in(path) == chunks_in(stored)
    assert damages(path) == []
    for level in ("raw", "2", "keep50-2"):
        assert rows(path, level) == rows(stored, level) != {}


def test_zeros_behind_a_narrow_side_take_next_to_nothing() -> None:
    draw = torch.Generator().manual_seed(3)
    keys, values = (torch.randn((1, 500, width), generator=draw) for width in (8, 40))
    sizes = [sum(map(len, CODECS["cachegen-2"].encode_layers([kv])[0])) for kv in ((keys, values), (values, values))]
    assert sizes[0] < 0.7 * sizes[1]  # as numbers 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ingest_compress_and_ask(name: str, tmp_path: Path, one_thread: None) -> None:
    path, model = tmp_path / "store", save_tiny(name, tmp_path / "model")
    corpus = write_corpus(tmp_path / "in", 1, 2)
    kvtool("ingest", corpus, "--store", path, "--model", model, *CHUNKS, *PREFIX).fine()
    done = kvtool("compress", "--level", "2", "--questions", "0", "--store", path, "--json").fine().json
    (level,) = done["levels"]
    assert (level["level"], level["chunks"]) == ("2", len(chunks_in(path)))
    assert damages(path) == []
    for chunk in chunks_in(path):
        assert_within(path, chunk, "2")
    asked = (QUESTION, "--store", path, "--level", "2", "--json")
    plan = kvtool("inspect", "plan", *asked).fine().json
    assert {(chunk["status"], chunk["level"]) for chunk in plan["chunks"]} == {("hit", "2")}
    reply = kvtool("query", *asked, "--fusion", "reuse", *SHORT).fine().json
    assert {chunk["status"] for chunk in reply["chunks"]} == {"hit"}
    assert reply["tokens"]["reused"] == plan["tokens"]["reused"] > 0
    assert reply["tokens"]["generated"] > 0
