"""`kvtool inspect deviation|sparsity`: numbers, tables, a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.model.decoder import Decoder
from tests.cli.working import CHUNKS, PREFIX, QUESTION, chunks_of, kvtool, write_batch, write_corpus
from tests.compress.making import fixed_losses, run
from tests.reports.test_page import Outline

REPORTS = ("deviation", "sparsity")


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    rows = [QUESTION, "When was the first mill built?", "Where is the fourth mill?"]
    return write_batch(tmp_path / "questions.jsonl", *({"question": row} for row in rows))


@pytest.mark.slow
def test_what_a_codec_loses_is_not_counted_as_reuse(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer of reused KV does not deviate, whatever `auto` would read; a level that is asked for is named."""
    path, html = tmp_path / "store", tmp_path / "page.html"
    corpus = write_corpus(tmp_path / "in", 2, 4)
    exactly = ("--store-dtype", "float32")
    kvtool("ingest", corpus, "--store", path, "--model", tiny, *CHUNKS, *PREFIX, *exactly).fine()
    at = ("inspect", "deviation", QUESTION, "--store", path, "--html", html, "--json")
    exact = kvtool(*at, "--level", "raw").fine().json
    fixed_losses(monkeypatch, {"4": 0.001})
    run(path, "4", questions=1)
    assert kvtool("inspect", "plan", QUESTION, "--store", path, "--json").fine().json["chunks"][0]["level"] == "4"
    found = kvtool(*at).fine().json
    assert "from exact records" in html.read_text(encoding="utf-8")
    assert found["level"] == "exact"
    assert found["layers"][0]["v_relative"] < 1e-6
    assert found["layers"] == exact["layers"]
    run(path, "4", keep_raw=False)
    kvtool(*at).failed(1, "is not stored exactly", "--level 4")
    lossy = kvtool(*at, "--level", "4").fine().json
    assert lossy["level"] == "4"
    assert lossy["layers"][0]["v_relative"] > 0.01
    assert "at level 4" in html.read_text(encoding="utf-8")


@pytest.mark.slow
def test_sparsity_reads_exact_records(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("inspect", "sparsity", QUESTION, "--store", store, "--json")
    exact = kvtool(*at).fine().json
    fixed_losses(monkeypatch)
    run(store, "2", questions=1)
    assert kvtool(*at).fine().json == exact
    assert exact["level"] == "exact"
    lossy = kvtool(*at, "--level", "2").fine().json
    assert (lossy["level"], lossy["chunk_attention"]) == ("2", exact["chunk_attention"])
    assert lossy["question_attention"] != exact["question_attention"]


@pytest.mark.slow
def test_the_pieces_of_a_chunk_are_its_text(store: Path, tmp_path: Path) -> None:
    text = "방앗간은 1769년에 지어졌다. 밀가루를 빻는다."
    (tmp_path / "korean.md").write_text(text, encoding="utf-8")
    kvtool("ingest", tmp_path / "korean.md", "--store", store).fine()
    at = ("--documents", "mill0.md", "korean.md", "--json")
    row = kvtool("inspect", "deviation", "언제?", "--store", store, *at).fine().json
    pieces = [piece["text"] for chunk in row["chunks"] for piece in chunk["pieces"]]
    assert text in "".join(pieces)
    assert len(pieces) > len(text.split())


@pytest.mark.parametrize("what", REPORTS)
def test_a_report_needs_no_room_for_an_answer(what: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()
    monkeypatch.setattr(Decoder, "check_length", lambda decoder, tokens, hint: lengths.append(tokens))
    kvtool("inspect", what, QUESTION, "--store", store, "--json").fine()
    prompt = kvtool("inspect", "plan", QUESTION, "--store", store, "--json").fine().json["tokens"]["prompt"]
    assert lengths[-1] == max(lengths) == prompt  # parts of it, before it is all known


@pytest.mark.parametrize("what", REPORTS)
def test_what_cannot_be_asked(what: str, store: Path, tmp_path: Path) -> None:
    at = ("inspect", what, "--store", store)
    for wrong in (
        (),
        (QUESTION, "--chunks", "0" * 40, "--documents", "mill2.md"),
        (QUESTION, "--level", "9"),
        (QUESTION, "--html", tmp_path),
        (QUESTION, "--html", tmp_path / "no" / "page.html"),
        (QUESTION, "--chunks", "0" * 40),
    ):
        kvtool(*at, *wrong).failed(2)
    assert kvtool("inspect", what, QUESTION, "--store", tmp_path / "nowhere").code == 10


@pytest.mark.parametrize("what", ["", "gate", "plan", "chunk", "quality", "codec", "deviation", "sparsity"])
def test_every_report_has_a_page(what: str, store: Path, batch: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    about: dict[str, tuple[object, ...]] = {
        "chunk": (chunks_of(store, "mill2.md")[0],),
        "plan": (QUESTION,),
        "quality": (batch, "--runs", "reuse,union:0.2"),
        "codec": ("--batch", batch, "--scheme", "int8", "--scheme", "cachegen-2"),
        "deviation": (QUESTION,),
        "sparsity": (QUESTION,),
    }
    at = ("inspect", *([what] if what else []), *about.get(what, ()), "--store", store)
    summary = kvtool(*at, "--html", html).fine().out
    outline = Outline(html.read_text(encoding="utf-8"))
    assert summary.split()[0] in outline.text
    if what in ("gate", "plan", "quality", "codec", *REPORTS):
        assert "table" in outline.tags
