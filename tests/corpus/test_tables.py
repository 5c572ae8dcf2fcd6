"""Long tables: each of their chunks begins with the header rows, and the places of the rows stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.common.marks import place_of
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.split import METHODS, SplitSettings, split
from kvtool.core.corpus.tables import split_document

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
