"""`compress --keep`: fewer rows, multiplied with a level, measured and read as levels are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvtool.core.cache.record import decode_record, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.row_subset import rows_of
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.prefill import LeadIn
from kvtool.core.records.encode import SINKS, heaviest, repeated
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.catalogue import is_own
from kvtool.core.remote.catalogue_io import read_head
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.upkeep.plan import old_profiles
from kvtool.reports.reused_prompt import watch_rows
from tests.cli.working import QUESTION, SHORT, damages, kvtool
from tests.compress.making import (
    LAYERS,
    chunks_in,
    decoded,
    drop,
    fixed_losses,
    levels_in,
    losses_of,
    prefix_of,
    refit,
    replace_record,
    rows,
    run,
    state_of,
)
from tests.families import MAX_POSITIONS
from tests.fusion.making import CHUNKS, PREFIX, case, tokens
from tests.wording import refused

HALF = "keep50-2"


@pytest.fixture(scope="module")
def sparse_store(fitted_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all levels, and half of the rows at two of them. Leave it as it is."""
    path = Path(shutil.copytree(fitted_store, tmp_path_factory.mktemp("sparse") / "store"))
    run(path, "2", "lossless", keep=0.5)
    return path


@pytest.fixture
def sparse(sparse_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sparse_store, tmp_path / "sparse"))


def rows_in(path: Path, chunk: str, level: str) -> set[tuple[int, ...]]:
    found = set()
    for (own, _), data in rows(path, level).items():
        if own == chunk:
            header, payload = decode_record(bytes.fromhex(own), data)
            shape = (header.kv_heads, header.tokens, header.head_dim_k)
            found.add(rows_of(Encoded(payload, shape, header.dtype)))
    return found


def tokens_of(path: Path, chunk: str) -> int:
    with Store.open(path) as store:
        info = store.chunk_info(bytes.fromhex(chunk))
        return len(info.token_ids)


@pytest.mark.slow
def test_half_of_the_rows(sparse: Path) -> None:
    assert damages(sparse) == []
    for chunk in chunks_in(sparse):
        (kept,) = rows_in(sparse, chunk, HALF)
        tokens = tokens_of(sparse, chunk)
        assert len(kept) == min(tokens, max(SINKS, -(-tokens // 2)))
        assert kept[: min(SINKS, tokens)] == tuple(range(min(SINKS, tokens)))
        assert rows_in(sparse, chunk, "keep50-lossless") == {kept}  # whatever the level
        raw, back = decoded(sparse, chunk, "raw"), decoded(sparse, chunk, "keep50-lossless")
        for side, whole in zip((*back.keys, *back.values), (*raw.keys, *raw.values), strict=True):
            assert torch.equal(side, whole[:, list(kept)])
    assert HALF not in levels_in(sparse)[prefix_of(sparse)]


def test_bits_and_loss_are_told(sparse: Path) -> None:
    """So that they can be compared with those of a level that stores every row."""
    report = run(sparse, "2", keep=0.5)
    (row,) = [level.to_json() for level in report.levels]
    stored = sum(len(data) for data in rows(sparse, HALF).values())
    elements = sum(tokens_of(sparse, chunk) for chunk in chunks_in(sparse)) * LAYERS * 2 * 2 * 16
    assert (report.encoded, report.kept) == (0, len(chunks_in(sparse)))
    assert row["bytes"] == stored
    assert row["bits_per_element"] == pytest.approx(8 * stored / elements, abs=1e-4)
    report = run(sparse, "2", keep=0.5, questions=2)
    (row,) = [level.to_json() for level in report.levels]
    assert row["kl_answer"] > 0
    assert row["questions"] == 2
    assert losses_of(sparse, chunks_in(sparse)[0])[HALF] == row["kl_answer"]


@pytest.mark.slow
def test_again_with_another_profile(sparse: Path) -> None:
    before = {level: rows(sparse, level) for level in ("3", "keep50-lossless", HALF)}
    old = state_of(sparse)["profile"]
    refit(sparse, "2", keep=0.5)
    assert rows(sparse, "3") == before["3"]
    assert rows(sparse, "keep50-lossless") == before["keep50-lossless"]
    with Store.open(sparse) as store:
        made = {store.made_with(bytes.fromhex(chunk), HALF) for chunk in chunks_in(sparse)}
    assert made == {state_of(sparse)["profile"]} != {old}


@pytest.mark.slow
def test_a_profile_that_only_they_name_stays(sparse: Path) -> None:
    old = bytes.fromhex(state_of(sparse)["profile"])
    refit(sparse, "2")  # all nested levels are of another one now
    with Store.open(sparse) as store:
        assert old not in old_profiles(store)
    drop(sparse, HALF)
    with Store.open(sparse) as store:
        assert old in old_profiles(store)


def test_what_can_be_asked_for(plain: Path) -> None:
    kvtool("compress", "--store", plain, "--keep", "0.6").failed(2, ".75, .5 or .25")
    run(plain, "raw", keep=0.25)
    assert {*levels_in(plain)[chunks_in(plain)[0]]} == {"raw", "keep25-raw"}
    kvtool("ingest", plain, "--store", plain, "--level", "keep50-2").failed(2)


def test_auto_takes_the_smallest_that_loses_little(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"keep75-lossless": 0.001, "keep75-raw": 0.001, "keep75-1": 0.001, "keep75-2": 0.004, "keep75-3": 0.02}
    asked = fixed_losses(monkeypatch, losses | {"keep75-4": 0.05})
    report = run(sparse, keep=0.75, max_loss=0.005, questions=1)
    assert {*asked[0]} == {*losses, "keep75-4"}
    assert [level.level for level in report.levels] == ["keep75-2"]


def test_rows_of_a_chunk() -> None:
    worth = torch.tensor([0.0, 0, 0, 0, 3, 1, 2, 5, 0, 4])
    assert heaviest(worth, 50) == (0, 1, 2, 3, 7)
    assert heaviest(worth, 75) == (0, 1, 2, 3, 4, 6, 7, 9)
    assert heaviest(worth[:3], 25) == (0, 1, 2)
    assert heaviest(torch.zeros(8), 75) == (0, 1, 2, 3, 4, 5)  # no draw
    decoder = case("llama").decoder
    lead_in, most = LeadIn(decoder, PREFIX), (MAX_POSITIONS - len(PREFIX)) // 2
    assert len(repeated(decoder, lead_in, [tokens(most, 1)])[0]) == most
    with refused(UsageError):
        repeated(decoder, lead_in, [CHUNKS[0], tokens(most + 1, 1)])


def test_what_a_row_is_worth_does_not_depend_on_its_batch() -> None:
    decoder = case("llama").decoder
    lead_in = LeadIn(decoder, PREFIX)
    together = repeated(decoder, lead_in, CHUNKS)
    for ids, worth in zip(CHUNKS, together, strict=True):
        assert torch.allclose(repeated(decoder, lead_in, [ids])[0], worth, rtol=1e-4)
        expected = torch.zeros(len(ids))
        text = (*PREFIX, *ids, *ids)
        seen: list[torch.Tensor] = []
        watch_all(decoder, text, seen)
        for weights in seen[:-1]:  # of the last layer none are computed
            most = weights[:, len(PREFIX) + len(ids) :, len(PREFIX) : len(PREFIX) + len(ids)].amax((0, 1))
            expected += most
        assert torch.allclose(worth, expected, rtol=1e-3)


def watch_all(decoder: Decoder, text: Sequence[int], seen: list[torch.Tensor]) -> None:
    cache = decoder.new_cache(len(text))
    cache.set_length(len(text))
    rows_of_text = QueryRows.of(torch.arange(len(text)), "cpu")

    def watch(layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        seen.append(attention_weights(query[0], key[0], rows_of_text.seen(scoring.window), scoring))

    watch_rows(decoder, text, 0, cache, watch)


def ask(path: object, *more: object) -> dict[str, object]:
    return kvtool("query", QUESTION, "--store", path, "--json", *SHORT, *more).fine().json


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reuse", "epic", "union", "blend", "infoflow"])
def test_a_question_reads_the_rows_that_are_there(mode: str, sparse: Path) -> None:
    whole, half = (ask(sparse, "--level", level, "--fusion", mode) for level in ("2", HALF))
    counts = half["tokens"]
    gone = sum(-(-chunk["tokens"] // 2) for chunk in half["chunks"])
    assert {chunk["status"] for chunk in half["chunks"]} == {"hit"}
    assert counts["dropped"] == sum(chunk["tokens"] for chunk in half["chunks"]) - gone
    assert counts["prompt"] == whole["tokens"]["prompt"] - counts["dropped"]
    assert counts["prompt"] == counts["reused"] + counts["recomputed"] + counts["fresh"]
    assert whole["tokens"]["dropped"] == 0
    assert half["bytes_read"] < whole["bytes_read"]


@pytest.mark.slow
def test_a_mode_that_loses_nothing_computes_all_of_it(sparse: Path) -> None:
    for mode in ("full", "prefix"):
        value = ask(sparse, "--level", HALF, "--fusion", mode)
        assert value["tokens"]["dropped"] == 0


def test_max_loss_chooses_among_them(sparse: Path) -> None:
    with Store.open(sparse) as store, store.writer() as writer:
        state = store.codec_state()
        measured = {"2": {"kl_answer": 0.002}, HALF: {"kl_answer": 0.008}, "4": {"kl_answer": 0.5}}
        writer.set_codec_state(state | {"losses": {state["profile"]: measured}})
    assert ask(sparse)["tokens"]["dropped"] > 0
    assert ask(sparse, "--set", "load.max_loss=0.005")["tokens"]["dropped"] == 0


@pytest.mark.slow
def test_explained(sparse: Path) -> None:
    value = ask(sparse, "--level", HALF, "--explain", "--fusion", "reuse")
    for chunk in value["chunks"]:
        spans = chunk["explanation"]["spans"]
        gone = sum(span["token_end"] - span["token_start"] for span in spans if span["reason"] == "dropped")
        assert abs(gone - chunk["tokens"] // 2) <= 2  # a character of several tokens has one fate
        assert chunk["explanation"]["reasons"] == {}
    assert (
        " not there"
        in kvtool("query", QUESTION, "--store", sparse, "--level", HALF, "--explain", "--fusion", "reuse", *SHORT)
        .fine()
        .err
    )


@pytest.mark.slow
def test_deferred_and_chosen_by_the_controller(sparse: Path) -> None:
    assert ask(sparse, "--level", HALF, "--defer", "--set", "defer.first=1")["tokens"]["dropped"] > 0
    kvtool("query", QUESTION, "--store", sparse, "--level", HALF, "--fusion", "auto", "--json", *SHORT).fine()
    kvtool("inspect", "plan", QUESTION, "--store", sparse, "--level", HALF).fine()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_record_is_computed_whole(layer: int, sparse: Path) -> None:
    drop(sparse, "raw")
    chunks = [chunk["id"] for chunk in ask(sparse, "--level", HALF)["chunks"]]
    replace_record(sparse, chunks[0], HALF, layer, lambda data: data.__setitem__(80, data[80] ^ 1))
    value = ask(sparse, "--level", HALF, "--fusion", "reuse")
    assert {chunk["id"] for chunk in value["chunks"] if chunk["status"] == "miss"} == {chunks[0]}


@pytest.mark.slow
def test_other_rows_than_the_first_layers_are_refused(sparse: Path) -> None:
    chunk = ask(sparse, "--level", HALF)["chunks"][0]["id"]

    def change(data: bytearray) -> None:
        header, payload = decode_record(bytes.fromhex(chunk), bytes(data))
        (kept,) = rows_in(sparse, chunk, HALF)
        spare = next(token for token in range(header.tokens) if token not in kept)
        other = bytearray(payload)
        start = len(other) - 12 - -(-header.tokens // 8)
        for token in (kept[-1], spare):
            other[start + token // 8] ^= 1 << token % 8
        data[:] = encode_record(bytes.fromhex(chunk), header, [other])

    replace_record(sparse, chunk, HALF, 3, change)
    found = {one["id"]: one for one in ask(sparse, "--level", HALF, "--fusion", "reuse")["chunks"]}
    assert found[chunk]["status"] == "miss"
    assert "other rows" in found[chunk]["reason"]


def test_pushed_pulled_and_asked_from_there(sparse: Path, tmp_path: Path) -> None:
    url, before = f"file://{tmp_path / 'tier'}", rows(sparse, HALF)
    expected = [ask(sparse, "--level", HALF, "--fusion", mode)["tokens"] for mode in ("union", "reuse")]
    with Store.open(sparse) as store, closing(open_blobs(url)) as blobs:
        assert push(store, blobs).damaged == []
        _, catalogue = read_head(blobs)
        assert any(HALF in chunk.levels for chunk in catalogue.chunks.values())
        assert all(is_own(name) for name in catalogue.blobs())
        pull(tmp_path / "other", blobs)
    assert rows(tmp_path / "other", HALF) == before
    assert ask(url, "--level", HALF, "--fusion", "union")["tokens"] == expected[0]
    assert ask(url, "--level", HALF, "--slo-ms", "600000", "--fusion", "reuse")["tokens"] == expected[1]
