"""`kvtool inspect codec`: bits and loss, for every level and for what others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import NESTED
from tests.cli.working import QUESTION, kvtool, write_batch
from tests.compress.making import LAYERS, chunks_in, drop, drop_profile, flip, replace_record

SCHEMES = {f"cachegen-{level}" for level in NESTED}


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return write_batch(
        tmp_path / "questions.jsonl",
        {"id": "a", "question": QUESTION, "answers": ["nobody"], "documents": ["mill1.md"]},
        {"id": "b", "question": "When was the first mill built?"},
        {"id": "c", "question": "Where?", "documents": ["mill0.md"]},
    )


def inspect(store: Path, *args: object) -> Any:
    return kvtool("inspect", "codec", "--store", store, *args)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [False, True])
def test_every_scheme(profile: bool, plain: Path, fitted: Path, batch: Path) -> None:
    path = fitted if profile else plain
    row = inspect(path, "--batch", batch, "--limit", "2", "--json").fine().json
    assert row["questions"] == 2
    assert set(row["exact"]) >= {"f1", "questions"}
    found = {scheme["scheme"]: scheme for scheme in row["schemes"]}
    assert set(found) == SCHEMES | (set(NESTED) if profile else set())
    for scheme in found.values():
        assert scheme["bits_per_element"] > 0
        assert scheme["ratio_vs_16bit"] == pytest.approx(16 / scheme["bits_per_element"])
        assert scheme["kl_answer"] >= 0
        assert scheme["kl_first"] >= 0
        assert 0 <= scheme["top1_agrees"] <= 1
        assert 0 <= scheme["f1"] <= 1
        assert scheme["questions"] == 2
        assert [layer["layer"] for layer in scheme["layers"]] == list(range(LAYERS))
        bits = [layer["bits_per_element"] for layer in scheme["layers"]]
        assert sum(bits) / LAYERS == pytest.approx(scheme["bits_per_element"])
        sides = ("k_relative_error", "v_relative_error")
        assert all(0 < layer[side] < 2 for layer in scheme["layers"] for side in sides)
    for names in (*([NESTED] if profile else []), *([f"cachegen-{n}" for n in NESTED],)):
        bits, losses = ([found[name][key] for name in names] for key in ("bits_per_element", "kl_answer"))
        assert bits == sorted(bits, reverse=True)
        assert losses[0] < losses[-1]
        for side in ("k_relative_error", "v_relative_error"):
            errors = [found[name]["layers"][LAYERS - 1][side] for name in names]
            assert errors == sorted(errors)


@pytest.mark.slow
def test_it_agrees_with_what_compress_stores(fitted: Path, batch: Path) -> None:
    """Bits of a level that is stored without others, on one document's chunks, are those of its records."""
    one = write_batch(batch.with_name("one.jsonl"), {"question": "Where?", "documents": ["mill0.md"]})
    for level in NESTED:
        drop(fitted, level)
    with Store.open(fitted) as store:
        (document,) = [entry for entry in store.documents() if entry.source.endswith("mill0.md")]
        chunks = [ref.chunk_id.hex() for ref in document.chunks]
    at = ("--store", fitted, "--questions", "0", "--json")
    (stored,) = kvtool("compress", *at, "--level", "2", "--chunks", *chunks).fine().json["levels"]
    (row,) = inspect(fitted, "--batch", one, "--scheme", "2", "--json").fine().json["schemes"]
    assert row["bits_per_element"] == pytest.approx(stored["bits_per_element"], abs=1e-3)


def test_errors(plain: Path, batch: Path, tmp_path: Path) -> None:
    inspect(plain).failed(2, "needs questions", "--batch")
    inspect(plain, "--batch", tmp_path / "nowhere.jsonl").failed(2, "cannot be read")
    inspect(plain, "--batch", batch, "--scheme", "int3").failed(2, "no scheme int3", "cachegen-1")
    unfitted = inspect(plain, "--batch", batch, "--scheme", "1", "--scheme", "int3")
    unfitted.failed(2, "no scheme 1, int3", "; 1 with a profile")
    inspect(plain, "--batch", batch, "--limit", "0").failed(2)
    inspect(tmp_path / "nowhere", "--batch", batch).failed(10)


def test_a_chunk_without_an_exact_record(fitted: Path, batch: Path) -> None:
    drop(fitted, "raw")
    inspect(fitted, "--batch", batch, "--scheme", "cachegen-1", "--json").failed(1, "is not stored exactly")


@pytest.mark.slow
def test_a_lossless_record_is_exact(fitted: Path, batch: Path) -> None:
    before = inspect(fitted, "--batch", batch, "--scheme", "cachegen-1", "--json").fine().json
    kvtool("compress", "--store", fitted, "--level", "lossless", "--drop-raw", "--questions", "0").fine()
    assert inspect(fitted, "--batch", batch, "--scheme", "cachegen-1", "--json").fine().json == before


def test_a_level_that_was_measured_to_lose_nothing_is_not_taken_for_exact(fitted: Path, batch: Path) -> None:
    with Store.open(fitted) as store, store.writer() as writer:
        losses = {level: {"kl_answer": 0.0} for level in NESTED}
        state = store.codec_state()
        writer.set_codec_state(state | {"losses": {state["profile"]: losses}})
    inspect(fitted, "--batch", batch, "--scheme", "cachegen-1", "--limit", "1").fine()


def test_damage_on_the_way(fitted: Path, batch: Path) -> None:
    """A loss against what was computed anew would say nothing of the records."""
    (one,) = chunks_in(fitted)[:1]
    replace_record(fitted, one, "raw", LAYERS - 1, flip)
    done = inspect(fitted, "--batch", batch, "--scheme", "cachegen-1", "--json")
    done.failed(13, f"the exact record of chunk {one[:12]} cannot be read: damaged", "--repair")
    drop_profile(fitted)
    inspect(fitted, "--batch", batch, "--scheme", "cachegen-1").failed(13, "profile", "--fit")
