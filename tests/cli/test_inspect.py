"""`kvtool inspect`: the glance, `chunk`, `deviation`, `sparsity`, and the page of every report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.core.cache.side_files import UseLog, read_served
from kvtool.core.cache.store import Store
from kvtool.core.model.decoder import Decoder
from tests.cli.working import (
    CHUNKS,
    PREFIX,
    QUESTION,
    SHORT,
    chunks_of,
    drop_records,
    kvtool,
    listing,
    prefix_chunk,
    write_batch,
    write_corpus,
)
from tests.compress.making import fixed_losses, run
from tests.reports.test_page import Outline


def test_the_help_of_reports_imports_no_torch() -> None:
    code = (
        "import sys; from kvtool.reports import REPORTS, load_report;"
        "[load_report(name) for name in (*REPORTS, 'glance')]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", ["gate --level 2", "chunk --top-k 3", "plan --runs reuse", "codec --level 2"])
def test_a_flag_of_another_report_is_refused(words: str, store: Path) -> None:
    name, flag, value = words.split()
    kvtool("inspect", name, flag, value, "--store", store).failed(
        2, f"No such option: {flag}", f"inspect {name} --help"
    )


def test_flags_may_stand_before_the_report(store: Path) -> None:
    behind = kvtool("inspect", "plan", QUESTION, "--store", store, "--json").fine().json
    before = kvtool("inspect", "--json", "--store", store, "plan", QUESTION).fine().json
    assert before.keys() == behind.keys()
    assert before["chunks"] == behind["chunks"]
    kvtool("inspect", "--runs", "full", "plan", QUESTION, "--store", store).failed(2, "--runs")


@pytest.mark.parametrize("at", [("gate", "more"), ("nonsense",), ("glance",)])
def test_what_is_no_report(at: tuple[str, ...], store: Path) -> None:
    kvtool("inspect", *at, "--store", store).failed(2)


def test_one_chunk(store: Path, tmp_path: Path) -> None:
    chunk, html = chunks_of(store, "mill2.md")[1], tmp_path / "chunk.html"
    row = kvtool("inspect", "chunk", chunk, "--store", store, "--html", html, "--json").fine().json
    assert row["id"] == chunk
    assert row["tokens"] == len(row["sensitivity"]) > 0
    assert all(level["bytes"] > 0 for level in row["levels"])
    (place,) = row["places"]
    text = Path(place["source"]).read_text(encoding="utf-8")
    assert row["text"] == text[place["start"] : place["end"]]
    page = Outline(html.read_text(encoding="utf-8"))
    assert row["text"].strip() in page.text
    assert f"{max(row['sensitivity']):.3g}" in page.text
    told = kvtool("inspect", "chunk", chunk[:8].upper(), "--store", store).fine().out
    assert "".join(f"| {line}".rstrip() + "\n" for line in row["text"].rstrip().split("\n")) in told
    assert chunk in told


@pytest.mark.slow
def test_a_place_of_several_chunks_names_them_all(tiny: Path, tmp_path: Path) -> None:
    """A line that is longer than a chunk."""
    (tmp_path / "long.txt").write_text("The mill stands on the river. " * 40)
    at = ("--store", tmp_path / "store")
    kvtool("ingest", tmp_path / "long.txt", *at, "--model", tiny, *CHUNKS, *PREFIX).fine()
    chunks = list(dict.fromkeys(chunks_of(tmp_path / "store", "long.txt")))
    assert len(chunks) > 1
    row = kvtool("inspect", "chunk", "long.txt:1", *at, "--json").fine().json
    assert list(dict.fromkeys([row["id"], *row["other_chunks"]])) == chunks
    assert f"also     chunk {row['other_chunks'][-1]}" in kvtool("inspect", "chunk", "long.txt:1", *at).fine().out
    asked = kvtool("query", QUESTION, *at, "--chunks", "long.txt:1", *SHORT, "--json").fine().json
    assert [chunk["id"] for chunk in asked["chunks"]] == [row["id"], *row["other_chunks"]]


def test_when_it_was_used(store: Path) -> None:
    with Store.open(store) as opened:
        used = opened.last_used()
    one, lost, *_ = [chunk for chunk in chunks_of(store, "mill5.md") if bytes.fromhex(chunk) not in used]
    drop_records(store, lost)
    for chunk in (one, lost):  # it counts, too, where the chunk has to be computed
        for expected in ("not yet", "20"):
            said = kvtool("inspect", "chunk", chunk, "--store", store).fine().out
            assert said.split("used")[1].strip().startswith(expected)
            kvtool("query", QUESTION, "--store", store, "--chunks", chunk, *SHORT).fine()


@pytest.mark.parametrize("text", ["", "12345", "no id at all", "0" * 40, "zz" * 20])
def test_no_such_chunk(text: str, store: Path) -> None:
    kvtool("inspect", "chunk", *([text] if text else []), "--store", store).failed(2, "kvtool store ls")


@pytest.mark.slow
def test_the_glance_tells_how_many_chunks_were_found(store: Path) -> None:
    at = ("--store", store)
    before = kvtool("inspect", *at, "--json").fine().json["usage"]
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT).fine()
    chunks = chunks_of(store, "mill2.md")
    drop_records(store, chunks[0])
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT).fine()
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", "--fusion", "full", *SHORT).fine()  # asks for no chunk
    compared = ("--compare", "full,reuse,epic,union")  # one question
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT, *compared).fine()
    served = kvtool("inspect", *at, "--json").fine().json["usage"]
    more = {name: served[name] - before[name] for name in ("questions", "hits", "misses")}
    assert more == {"questions": 3, "hits": 3 * len(chunks) - 1, "misses": 1}
    assert served["hit_rate"] == served["hits"] / (served["hits"] + served["misses"])
    assert f"{served['questions']} questions" in kvtool("inspect", *at).fine().out


def test_counts_that_cannot_be_read_count_nothing(tmp_path: Path) -> None:
    log = UseLog(tmp_path, enabled=True)
    log.note_question(3, 1)
    log.note_question(2, 0)
    log.flush()
    log.flush()
    assert read_served(tmp_path).hits == 5
    path = tmp_path / "served.log"
    path.write_bytes(path.read_bytes() + b"9 9 9 00000000\n\xff\n7 7")
    total = read_served(tmp_path)
    assert (total.questions, total.hits, total.misses) == (2, 5, 1)
    closed = UseLog(tmp_path / "nowhere", enabled=True)
    closed.note_question(1, 1)
    closed.flush()
    assert read_served(tmp_path / "nowhere").hit_rate is None
    UseLog(tmp_path, enabled=False).note_question(1, 1)
    assert read_served(tmp_path) == total


def test_the_glance_counts_the_chunks_that_ls_lists(store: Path) -> None:
    """The prompt's own beginning is a chunk of the store that no document has; it is counted separately."""
    listed = {chunk["id"]: chunk["tokens"] for document in listing(store) for chunk in document["chunks"]}
    for command in (("inspect",), ("store", "stats")):
        row = kvtool(*command, "--store", store, "--json").fine().json
        assert row["prefix"]["id"] == prefix_chunk(store)
        assert row["chunks"] == len(listed)
        assert row["tokens"] == sum(listed.values())
    told = kvtool("inspect", "--store", store).fine().out
    assert f"{len(listed)} chunks; KV of {sum(listed.values()):,} tokens\n" in told
    assert f"beginning: {row['prefix']['tokens']} tokens, one chunk more\n" in told


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
        "codec": ("--batch", batch, "--scheme", "cachegen-2"),
        "deviation": (QUESTION,),
        "sparsity": (QUESTION,),
    }
    at = ("inspect", *([what] if what else []), *about.get(what, ()), "--store", store)
    summary = kvtool(*at, "--html", html).fine().out
    outline = Outline(html.read_text(encoding="utf-8"))
    assert summary.split()[0] in outline.text
    if what in ("gate", "plan", "quality", "codec", *REPORTS):
        assert "table" in outline.tags
