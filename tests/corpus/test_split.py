"""The laws of split: cover, limit, whole, visible, deterministic, stable; and long tables: each of their chunks begins
with the header rows, and the places of the rows stay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtool.core.common.marks import place_of
from kvtool.core.corpus.outline import units
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.split import METHODS, CountTokens, SplitSettings, split
from kvtool.core.corpus.tables import split_document
from kvtool.core.errors import UsageError


def by_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def by_bytes(texts: Sequence[str]) -> list[int]:
    return [len(text.encode()) // 3 for text in texts]


def by_quarters(texts: Sequence[str]) -> list[int]:
    """One more than the parts have together: the counter that adds up worst."""
    return [len(text) // 4 + 1 for text in texts]


COUNTERS: list[CountTokens] = [by_words, by_bytes, by_quarters]
KINDS = ["text", "markdown", "html", "code"]

_STRUCTURE = (
    *("\n", "\n\n", "\r\n", " ", "  \n \n", "# Head\n", "## Sub\n\n", "```\n", "| a | b |\n", "- item\n", ". "),
    *(
        *("다. ", "。", "Title\n=====\n", "    x = 1\n", "}\n", "한국어 문장이다.", "👩\u200d👩\u200d👧\u200d👦"),
        "e\u0301" * 3,
    ),
    *("\u200b", "\x1c", "\t", "…" * 9),
)
_texts = st.lists(
    st.one_of(st.sampled_from(_STRUCTURE), st.text(max_size=40), st.from_regex(r"\A[a-z]{1,9} ?\Z")), max_size=60
).map("".join)


def chunks(text: str, setting: SplitSettings, counter: CountTokens, kind: str = "text") -> list[str]:
    return [text[span.start : span.end] for span in split(text, setting, counter, kind)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=_texts,
    method=st.sampled_from(sorted(METHODS)),
    most=st.integers(8, 60),
    share=st.integers(0, 4),
    counter=st.sampled_from(COUNTERS),
    kind=st.sampled_from(KINDS),
)
@example("\n\n```\n" + "a b c d e f g h i j\n" * 9, "semantic", 8, 0, by_words, "markdown")
@example("a" + " " * 400 + "b" * 400, "paragraph", 8, 0, by_bytes, "text")
@example("# A\n# B\n# C\n" * 20, "markdown", 8, 4, by_words, "markdown")
def test_laws(text: str, method: str, most: int, share: int, counter: CountTokens, kind: str) -> None:
    setting = SplitSettings(method, most, most * share // 4)
    parts = chunks(text, setting, counter, kind)
    if not text.strip():
        assert parts == []
        return
    assert "".join(parts) == text
    assert all(part.strip() for part in parts)
    assert max(counter([part.strip() for part in parts])) <= most
    if len(text) <= 64 * most:
        assert (len(parts) == 1) == (counter([text.strip()])[0] <= most)
    assert parts == chunks(text, setting, counter, kind)


def prose(rng: random.Random, count: int) -> list[str]:
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(1500)]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(6, 24))).capitalize() + rng.choice(".....!?")

    return [" ".join(sentence() for _ in range(rng.randint(2, 6))) for _ in range(count)]


EDITS: dict[str, tuple[int, int, list[str]]] = {  # a slice of a paragraph's sentences, and what replaces it
    "delete": (0, 1, []),
    "insert": (1, 1, ["A sentence that was not here before stands here now"]),
    "replace": (0, 1, ["Other words take the place of what was said"]),
}


def _edited(paragraphs: list[str], edit: str, rng: random.Random) -> list[str]:
    place = rng.randint(20, 40)
    sentences, (start, stop, new) = paragraphs[place].split(". "), EDITS[edit]
    sentences[start:stop] = new
    return [*paragraphs[:place], ". ".join(sentences) or "Gone", *paragraphs[place + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("method", "mean", "worst"), [("semantic", 2.0, 5), ("markdown", 2.0, 5), ("paragraph", 3.0, 9)]
)
def test_an_edit_changes_few_chunks(method: str, mean: float, worst: int, edit: str) -> None:
    rng = random.Random(7)
    changed = []
    for _ in range(30):
        before = prose(rng, 60)
        after = _edited(before, edit, rng)
        old = set(chunks("\n\n".join(before), SplitSettings(method), by_quarters))
        new = chunks("\n\n".join(after), SplitSettings(method), by_quarters)
        assert len(new) > 20
        changed.append(sum(chunk not in old for chunk in new))
    assert sum(changed) / len(changed) <= mean
    assert max(changed) <= worst


def test_an_edit_in_one_long_line_changes_few_chunks() -> None:
    rng = random.Random(5)
    line = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=40_000))
    old = set(chunks(line, SplitSettings(), by_quarters))
    new = chunks(line[:20_000] + "!" + line[20_000:], SplitSettings(), by_quarters)
    assert sum(chunk not in old for chunk in new) <= 6


def test_chunks_end_at_paragraphs_sentences_and_graphemes() -> None:
    one, two, three = ("word " * count for count in (90, 80, 150))
    text = ". Next ".join([one, one]).strip() + ".\n\n" + two.strip() + ".\n\n" + three.strip() + "."
    parts = chunks(text, SplitSettings(), by_words)
    assert len(parts) == 2
    assert parts[0].endswith(".\n\n")
    assert min(by_words(parts)) >= 150
    lines = "the quick brown fox jumps over the lazy dog and then goes on to do\nsomething else in the next line of"
    text = f"Once {lines} text. " * 6
    parts = chunks(text.strip(), SplitSettings("semantic", 60), by_words)
    assert all(part.rstrip().endswith(".") for part in parts)
    family, flag, accent = "👩‍👩‍👧‍👦", "🇰🇷", "e\u0301"
    text = (family + flag + accent) * 200
    for part in chunks(text, SplitSettings("semantic", 50), by_bytes):
        assert part[0] in (family[0], flag[0], "e")
        assert part.count("\U0001f1f0") == part.count("\U0001f1f7")


def test_sections_fences_and_tables() -> None:
    rng = random.Random(2)
    sections = [f"## Section {i}\n\n" + "\n\n".join(prose(rng, 3)) + "\n\n" for i in range(8)]
    for method in ("semantic", "markdown"):
        parts = chunks("".join(sections), SplitSettings(method), by_words, "markdown")
        starts = [part for part in parts if part.startswith("## ")]
        assert len(starts) == 8
        assert not any(part.rstrip().splitlines()[-1].startswith("#") for part in parts)
    body = "\n\n".join(prose(random.Random(2), 3))
    text = f"Chapter 1\n\n{body}\n\nINTRODUCTION\n\n{body}\n\nTitle\n=====\n\n{body}\n\n제3장 결론\n\n{body}"
    heads = [part.split("\n")[0] for part in chunks(text, SplitSettings(), by_words)]
    assert {"Chapter 1", "INTRODUCTION", "Title", "제3장 결론"} <= set(heads)
    rng = random.Random(4)
    fence = "```python\n" + "".join(f"x{i} = {i}\n\n" for i in range(12)) + "```\n\n"
    table = "| a | b |\n| --- | --- |\n" + "".join(f"| {i} | {i} |\n" for i in range(8)) + "\n"
    text = "\n\n".join([*prose(rng, 3), fence + table, *prose(rng, 3)])
    parts = chunks(text, SplitSettings("markdown", 100), by_words, "markdown")
    assert any(fence.strip() in part for part in parts)
    assert any(table.strip() in part for part in parts)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("오늘은 맑다. 내일은 흐리고 모레는 비가 온다.", "오늘은 맑다. "),
        ("오늘은날씨가매우맑았다.그러나내일은흐리다.", "오늘은날씨가매우맑았다."),
        ("今日はとても良い天気ですね。明日は雨です。", "今日はとても良い天気ですね。"),
        ("He met Dr. Smith of Acme. They talked.", "He met Dr. Smith of Acme. "),
        ("“Is it really so?” She nodded at him.", "“Is it really so?” "),
    ],
)
def test_sentence_ends(text: str, first: str) -> None:
    counter: CountTokens = lambda texts: [len(text) for text in texts]  # noqa: E731
    most = max(len(first), len(text) - len(first))
    assert chunks(text, SplitSettings("semantic", most, 1), counter)[0] == first


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "The lighthouse of Varn Skerry\nThe lighthouse of Varn Skerry was built in 1783 by the engineer Odile\n"
            "Krantz.\nIts lamp burned whale oil until 1861, when the council of the island bought a\n"
            "new one that had cost them ninety silver coins.\n",
            "was built in 1783 by the engineer Odile\nKrantz.",
        ),
        (
            "한빛마을 도서관의 역사\n한빛마을 도서관은 1962년에 서윤아 선생이 세웠다. 도서관 건물은 옛 양조\n"
            "장을 고쳐 지었다.\n도서관 뒤뜰에는 감나무가 세 그루 있었다.\n",
            "도서관 건물은 옛 양조\n장을 고쳐 지었다.",
        ),
    ],
    ids=["english", "korean"],
)
def test_sentences_of_a_pdf_go_over_its_line_ends(text: str, sentence: str) -> None:
    """Its titles and the last lines of its paragraphs are short, and no empty line is around them."""
    found = [text[one.start : one.end].strip() for one in units(text, "text")]
    assert any(one.endswith(sentence) for one in found)
    assert found[0] == text.partition("\n")[0]


@pytest.mark.parametrize("bad", [{"method": "none"}, {"max_tokens": 0}, {"min_tokens": 257}, {"min_tokens": -1}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SplitSettings(**bad)  # type: ignore[arg-type]


_MOST = 60


def _count(texts: list[str]) -> list[int]:
    return [len(text.split()) + text.count(",") + text.count(";") for text in texts]


def _chunks(document: Document, most: int = _MOST) -> list[tuple[str, int | None]]:
    """Each chunk's text, and the line that is cited for it."""
    made, spans = split_document(document, SplitSettings(max_tokens=most), _count)
    assert "".join(made.text[span.start : span.end] for span in spans) == made.text
    texts = [made.text[span.start : span.end].strip() for span in spans]
    assert all(count <= most for count in _count(texts))
    lines = [place_of(made.text, made.marks, span.start, span.end).line for span in spans]
    return list(zip(texts, lines, strict=True))


def _read(name: str, text: str) -> Document:
    (document,) = read_documents(Path("/in") / name, text.encode())
    return document


_ROWS = [[f"Quay {n}", f"{n * 7 % 100}", f"Keeper {n}"] for n in range(80)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_every_chunk_of_a_csv_file_begins_with_its_header(delimiter: str) -> None:
    lines = [delimiter.join(row) for row in [["quay", "crates", "keeper"], *_ROWS]]
    chunks = _chunks(_read("a.csv", "\n".join(lines) + "\n"))
    assert len(chunks) > 5
    for text, line in chunks:
        header, first, *_ = text.split("\n")
        assert header == lines[0]
        assert lines[(line or 0) - 1] in (first, header)


def test_lines_above_a_csv_header_are_not_repeated() -> None:
    rows = "\n".join(",".join(row) for row in _ROWS)
    chunks = _chunks(_read("a.csv", f"Report of 2031\n\nquay,crates,keeper\n{rows}\n"))
    assert all(text.startswith("quay,crates,keeper\nQuay") for text, _ in chunks[1:])
    assert sum("Report of 2031" in text for text, _ in chunks) == 1


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{n},{n * 3},{n * 5}\n" for n in range(100)),
        "\n".join(",".join(f"{row}.{n}" if row else f"column{n}" for n in range(40)) for row in range(21)),
        "quay,crates\nNorth,4\nSouth,7\n",
    ],
    ids=["rows of numbers", "a wide header", "a table that fits"],
)
def test_no_header_is_repeated(text: str) -> None:
    document = _read("a.csv", text)
    assert split_document(document, SplitSettings(max_tokens=_MOST), _count)[0] is document


def test_quoted_cells_are_not_cut() -> None:
    rows = "".join(f'Quay {n},"first line\nsecond line, {n}",{n}\n' for n in range(60))
    chunks = _chunks(_read("a.csv", f"quay,note,crates\n{rows}"), most=40)
    assert sum(text.startswith("quay,note,crates\nQuay") for text, _ in chunks) >= len(chunks) - 1 > 5
    assert not any("first line\nquay,note" in text for text, _ in chunks)
    rows = "".join(f'Quay {n},"first line\nsecond {n}","third {n}\nlast"\n' for n in range(60))
    chunks = _chunks(_read("a.csv", f"quay,note,more\n{rows}"), most=40)
    assert len(chunks) > 5
    assert all(text.startswith("quay,note,more\nQuay") for text, _ in chunks)


@pytest.mark.parametrize(
    "header",
    ["Quay,2031-01-01,2031-02-01", "Quay,0-4,65+", "Quay,Value,Value", "Quay,2030,2031", f"Quay,{'long ' * 30},Crates"],
)
def test_headings_of_many_kinds_are_told_from_rows(header: str) -> None:
    rows = "".join(f"Quay {n},{n * 3},{n * 7}\n" for n in range(60))
    chunks = _chunks(_read("a.csv", f"{header}\n{rows}"), most=90)
    assert len(chunks) > 3
    assert all(text.startswith(header + "\nQuay") for text, _ in chunks)


def test_headings_of_years_and_of_two_levels() -> None:
    head = "Quay | 2030 | 2030 | 2031 | 2031\nQuay | Jan | Feb | Jan | Feb\n"
    rows = "".join(f"Quay {n} | {n} | {n * 2} | {n * 3} | {n * 4}\n" for n in range(60))
    assert all(text.startswith(head) for text, _ in _chunks(_read("a.md", head + rows)))
    rows = "".join(f"<tr><td>Quay {n}<td>{n * 13}<td>{n * 17}</tr>" for n in range(70))
    page = f"<table><tr><th>Quay<th>2021<th>2022</tr>{rows}</table>"
    assert all(text.startswith("Quay | 2021 | 2022\n") for text, _ in _chunks(_read("a.html", page)))


def test_markdown_repeats_the_header_with_its_rule() -> None:
    head = "| quay | crates | keeper |\n| --- | :-: | --- |\n"
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _ROWS)
    document = _read("a.md", f"# Quays\n\nWho keeps which quay.\n\n{head}{rows}\nThe end of the list.\n")
    chunks = _chunks(document)
    inside = [text for text, _ in chunks if "Keeper" in text]
    assert all(head in text for text in inside)
    assert all(text.startswith(head) for text in inside[1:])
    lines = document.text.split("\n")
    assert all(lines[(line or 0) - 1] == text.split("\n")[2] for text, line in chunks[1:] if text.startswith(head))
    rows = "".join(f"Quay {n}|{n}\n" for n in range(80))
    chunks = _chunks(_read("a.md", f"Quay|Crates\n-|-\n{rows}"))
    assert all(text.startswith("Quay|Crates\n-|-\n") for text, _ in chunks)
    assert not any("Crates\nQuay" in text for text, _ in _chunks(_read("b.md", f"Quay|Crates\n{rows}"))[1:])


def test_a_header_without_end_is_never_counted() -> None:
    rows = "".join(f"{n},{n}\n" for n in range(90))
    document = Document("/a", ",".join(f"column{n}" for n in range(1000)) + f"\n{rows}", "table")
    longest = 0

    def count(texts: Sequence[str]) -> list[int]:
        nonlocal longest
        longest = max([longest, *map(len, texts)])
        return _count([*texts])

    split_document(document, SplitSettings(max_tokens=_MOST), count)
    assert longest <= 4100


def test_prose_beside_a_table_keeps_its_chunks() -> None:
    prose = "".join(f"Keeper {n} rows to the island and lights the lamp there.\n\n" for n in range(40))
    table = "quay | crates\n--- | ---\n" + "".join(f"Quay {n} | {n}\n" for n in range(80))
    text = f"# Keepers\n\n{prose}# Quays\n\n{table}\n# More\n\n{prose}"
    plain = [text[span.start : span.end] for span in split(text, SplitSettings(max_tokens=_MOST), _count, "markdown")]
    chunks = [text for text, _ in _chunks(_read("a.md", text))]
    assert {each.strip() for each in plain if "Quay" not in each} <= set(chunks)


@given(
    st.lists(
        st.sampled_from(["a,b\n", "x,1\n", '"q\n', "\n", "# T\n", "a | b\n", "--- | ---\n", "1 | 2\n"]), max_size=60
    ),
    st.sampled_from(["table", "markdown", "text", "html"]),
    st.sampled_from(sorted(METHODS)),
)
def test_any_text_keeps_the_laws_of_a_split(lines: list[str], kind: str, method: str) -> None:
    document = Document("/a", "".join(lines), kind)
    made, spans = split_document(document, SplitSettings(method, 12), _count)
    texts = [made.text[span.start : span.end] for span in spans]
    assert "".join(texts) == (made.text if spans else "")
    assert all(count <= 12 for count in _count([text.strip() for text in texts]))
    added, at = 0, 0
    for char in made.text:  # what was inserted can be taken away again
        if at < len(document.text) and char == document.text[at]:
            at += 1
        else:
            added += 1
    assert at == len(document.text)
    assert added == len(made.text) - len(document.text)


@pytest.mark.parametrize("stray", ['5" pipe', 'a "b'])
def test_a_quotation_mark_inside_of_a_cell_opens_none(stray: str) -> None:
    rows = [f'row{n},{stray if n == 3 else n},"n{n}\nsecond"\n' for n in range(120)]
    chunks = _chunks(_read("a.csv", "name,size,note\n" + "".join(rows)))
    assert len(chunks) > 10
    assert all(text.startswith("name,size,note\nrow") for text, _ in chunks[1:])
