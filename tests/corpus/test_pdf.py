"""What the reader of PDFs makes of positions, form fields and comments."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from kvtool.core.corpus.readers import read_as
from kvtool.core.corpus.readers.document import Document
from tests.support.office.portable import drawing, pdf

_LEFT = ["The harbour was built", "by the two families who", "had owned the shore and", "the boats for so long."]
_RIGHT = ["Salt came from the south", "on ships that never went", "home without some dried", "cod in their dark holds."]


def _read(data: bytes) -> Document:
    (document,) = read_as(PurePath("a.pdf"), "a.pdf", data)
    return document


def _shown(*texts: tuple[float, float, str], size: float = 12) -> str:
    return "\n".join(f"BT /F1 {size} Tf 1 0 0 1 {x} {y} Tm ({text}) Tj ET" for x, y, text in texts)


def _rows(*rows: str) -> str:
    cells = [(72 + 90 * n, 700 - 20 * at, text) for at, row in enumerate(rows) for n, text in enumerate(row.split())]
    return _shown(*(cell for cell in cells if cell[2] != "."))


def _columns(left: list[str], right: list[str]) -> str:
    rows = enumerate(zip(left, right, strict=True))
    return _shown(*(cell for at, (a, b) in rows for cell in ((72, 700 - 14 * at, a), (320, 700 - 14 * at, b))))


def _field(kind: str, name: str, more: str, left: float = 220, bottom: float = 700) -> str:
    rect = f"/Rect [{left} {bottom} {left + 100} {bottom + 16}]"
    return f"/Subtype /Widget /FT /{kind} /T ({name}) {rect} /F 4 {more}"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("Mill A B C, East 1 2 3, West 4 5 6", "Mill A B C\nEast 1 2 3\nWest 4 5 6\n"),
        (
            "Depot May June July, Oslo . 31 ., Bergen 5 . 8, Narvik 1 2 3",
            "Depot | May | June | July\nOslo |  | 31\nBergen | 5 |  | 8\nNarvik | 1 | 2 | 3\n",
        ),
        (
            ". Jan Feb Mar, Alder 12 . 7, Birch . 9 ., Cedar . 3 5",
            " | Jan | Feb | Mar\nAlder | 12 |  | 7\nBirch |  | 9\nCedar |  | 3 | 5\n",
        ),
    ],
)
def test_cells_of_a_table_keep_their_column(rows: str, text: str) -> None:
    assert _read(drawing([_rows(*rows.split(", "))])).text == text


def test_empty_cells_are_kept_above_a_caption() -> None:
    table = _rows("Line Mon Tue", "Blue . 9", "Green 4 6")
    for left in (40, 110):
        caption = _shown((left, 644, "Source: office"))
        lines = _read(drawing([f"{table}\n{caption}"])).text.splitlines()
        assert lines == ["Line | Mon | Tue", "Blue |  | 9", "Green | 4 | 6", "Source: office"]


@pytest.mark.parametrize("drop", [0, 7, 14])  # of cells of one line: aligned to the top, middle or bottom
def test_wrapped_cells_of_a_drawn_table_stay_in_their_row(drop: int) -> None:
    rows = [("Item", "Re-|mark", "Qty", "Price"), ("Rope", "white,|of hemp", "4", ""), ("Pin", "", "", "3")]
    cells = [
        (72 + 90 * n, 700 - 40 * at - 14 * line - drop * ("|" not in cell), text)
        for at, row in enumerate(rows)
        for n, cell in enumerate(row)
        for line, text in enumerate(cell.split("|"))
        if text
    ]
    grid = "\n".join(f"62 {716 - 40 * at} m 430 {716 - 40 * at} l S" for at in range(4))
    text = _read(drawing([f"{_shown(*cells)}\n{grid}"])).text
    assert text == "Item | Remark | Qty | Price\nRope | white, of hemp | 4\nPin |  |  | 3\n"


def test_columns_drawn_row_by_row_are_read_one_after_another() -> None:
    assert _read(drawing([_columns(_LEFT, _RIGHT)])).text == "\n".join([*_LEFT, *_RIGHT]) + "\n"
    left = [
        "1. Fees",
        "Ships pay a fee of 40 crowns for",
        "Every night. Boats under 6 m are",
        "Free of these fees in May.",
    ]
    right = ["2. Waste", "Bring your waste to the yellow", "Office at the pier. Oil goes into", "The drum at pier 4."]
    assert _read(drawing([_columns(left, right)])).text == "\n".join([*left, *right]) + "\n"


def test_a_table_of_two_columns_is_read_by_rows() -> None:
    names, values = (
        ["Length over all", "Draught when full", "Crew", "Year"],
        ["twelve metres", "two metres", "Nine", "1868"],
    )
    text = _read(drawing([_columns(names, values)])).text
    assert text.splitlines() == [f"{name} {value}" for name, value in zip(names, values, strict=True)]
    ruled = "\n".join(f"62 {696 - 14 * at} m 500 {696 - 14 * at} l S" for at in range(3))
    assert "built Salt" in _read(drawing([f"{_columns(_LEFT, _RIGHT)}\n{ruled}"])).text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("the fog-", "horn sounds"), "the foghorn sounds"),
        (("a well-", "known pilot"), "a well-known pilot"),
        (("a fog-bound port, a fog-", "bound ship"), "a fog-bound port, a fog-bound ship"),
        (("the built-", "in lamp"), "the built-in lamp"),
        (("state-of-", "the-art"), "state-of-the-art"),
        (("in 2031-", "32 and"), "in 2031-32 and"),
        (("pump KX-", "220 runs"), "pump KX-220 runs"),
        (("an X-", "ray of it"), "an X-ray of it"),
        (("l'e-", "xemple"), "l\u2019exemple"),
        (("for twenty-", "one ships"), "for twenty-one ships"),
        (("a high-", "speed boat"), "a high-speed boat"),
        (("the high-", "lights of"), "the highlights of"),
        (("die Ein-", "und Ausfuhr"), "die Ein- und Ausfuhr"),
        (("some rock-", "and-roll"), "some rock-and-roll"),
        (("near Stoke-", "Mandeville"), "near Stoke-Mandeville"),
    ],
)
def test_words_cut_at_line_ends_are_joined_and_hyphens_kept(lines: tuple[str, str], text: str) -> None:
    assert _read(drawing([_shown((72, 700, lines[0]), (72, 686, lines[1]))])).text == text + "\n"


@pytest.mark.parametrize(
    ("base", "width", "raised", "text"),
    [
        ("about 10", 44.7, "9", "about 10^9 litres"),
        ("Depth", 30.7, "2", "Depth[2] litres"),
        ("5 km", 25.3, "2", "5 km^2 litres"),
        ("in 1987", 39.4, "4", "in 1987[4] litres"),
    ],
)
def test_raised_numbers_are_marked(base: str, width: float, raised: str, text: str) -> None:
    parts = _shown((72, 700, base), (72 + width + 4, 700, " litres")) + "\n" + _shown((72 + width, 705, raised), size=7)
    ordered = sorted(parts.split("\n"), key=lambda part: float(part.split()[8]))
    assert _read(drawing(["\n".join(ordered)])).text == text + "\n"


@pytest.mark.parametrize("note", ["Except on Fogo", "2031: moved"])
def test_raised_numbers_before_a_note_are_marked(note: str) -> None:
    parts = _shown((72, 705, "1"), size=7), _shown((76, 700, note))
    assert _read(drawing(["\n".join(parts)])).text == f"[1] {note}\n"


def test_lowered_numbers_stay_in_their_formula() -> None:
    content = "\n".join([_shown((72, 700, "H")), _shown((80.7, 698, "2"), size=7), _shown((84.6, 700, "O"))])
    assert _read(drawing([content])).text == "H2O\n"


@pytest.mark.parametrize("head", ["Room {}", "Chapter {}", "Berth {} north"])
def test_rising_heads_are_kept(head: str) -> None:
    text = _read(pdf([[head.format(n), f"The {n} boats are out."] for n in range(1, 6)])).text
    assert all(head.format(n) in text for n in range(1, 6))


@pytest.mark.parametrize("foot", ["{}", "Page {}", "- {} -", "{} / 5", "Seite {}"])
def test_page_numbers_are_left_out(foot: str) -> None:
    text = _read(pdf([["Berths", f"The {n} boats are out.", foot.format(n)] for n in range(1, 6)])).text
    assert foot.format(1) in text
    assert not any(f"\n{foot.format(n)}\n" in text for n in range(2, 6))
    assert text.count("Berths") == 1


def test_heads_of_tables_are_kept_on_every_page() -> None:
    pages = [_rows("Depot May June", f"A{n} {n} 2", f"B{n} 3 {n}") for n in range(4)]
    assert _read(drawing(pages)).text.count("Depot May June\nA") == 4


def test_form_values_are_behind_their_labels() -> None:
    labels = _shown((72, 704, "Name"), (72, 664, "Port:"), (330, 664, "Insured"), (72, 624, "Night"), (172, 624, "Day"))
    fields = [
        _field("Tx", "n", "/V (Ase Lund)"),
        _field("Ch", "p", "/Ff 131072 /Opt [[(b) (Bergen)] [(t) (Tromso)]] /V (t)", bottom=660),
        _field("Btn", "i", "/V /On /AS /On /AP << /N << /On 3 0 R /Off 3 0 R >> >>", left=440, bottom=660),
        _field("Btn", "c", "/V /Off /AS /Off /AP << /N << /On 3 0 R /Off 3 0 R >> >>", left=205, bottom=620),
        _field("Tx", "remark", "/V (Fragile)", bottom=400),
    ]
    assert _read(drawing([labels], fields)).text.splitlines() == [
        *("Name: Ase Lund", "Port: Tromso Insured: yes", "Night Day: no", "remark: Fragile")
    ]


def test_fields_without_labels_and_hidden_ones_are_read() -> None:
    assert _read(drawing([""], [_field("Tx", "name", "/V (Ase Lund)")])).text == "name: Ase Lund\n"
    field = _field("Tx", "total", "/V (440)").replace("/F 4", "/F 2")
    document = _read(drawing([_shown((72, 704, "Total"))], [field]))
    assert document.text == "Total\ntotal: 440\n"
    assert document.notes == ("hidden field 'total': read like those that are shown",)


@pytest.mark.parametrize("kind", ["Text", "FreeText", "Highlight"])
def test_comments_are_marked(kind: str) -> None:
    note = f"/Subtype /{kind} /Rect [50 50 90 90] /Contents (Paint the hull) /T (Ase)"
    document = _read(drawing([_shown((72, 704, "Plan")), _shown((72, 704, "End"))], [note]))
    assert document.text == "Plan\n[note by Ase: Paint the hull]\n\nEnd\n"
    assert [mark.place for mark in document.marks] == ["p. 1", "p. 2"]


def test_what_is_not_read_is_noted() -> None:
    names = "/Names << /EmbeddedFiles << /Names [(a.txt) << /Type /Filespec /F (a.txt) >>] >> >>"
    note = "/Subtype /FileAttachment /Rect [50 50 90 90]"
    assert _read(drawing([_shown((72, 704, "Plan"))], [note], names)).notes == ("embedded files: 2 not read",)
    form = "/AcroForm << /Fields [] /XFA [(datasets) 5 0 R] >>"
    data = drawing([_shown((72, 704, "Please wait"))]).replace(b"/AcroForm << /Fields [] >>", form.encode())
    assert _read(data).notes == ("XFA forms: 1 not read",)
    data = drawing([_shown((72, 704, "Plan")), _shown((72, 704, "End"))])
    damaged = data.replace(b"/Kids [4 0 R 6 0 R]", b"/Kids [4 0 R 3 0 R]")
    assert _read(damaged).notes == ("page 2: damaged, not read",)


def test_text_outside_the_page_and_turned_lines() -> None:
    assert _read(drawing([_shown((72, 704, "Plan"), (72, 900, "Printers mark"))])).text == "Plan\n"
    lines = "\n".join(f"BT /F1 12 Tf 0 1 -1 0 {100 + 14 * at} 100 Tm ({text}) Tj ET" for at, text in enumerate(_LEFT))
    assert _read(drawing([lines])).text == "\n".join(_LEFT) + "\n"
