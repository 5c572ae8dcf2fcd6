"""Rich text: what its control words mean for the text."""

from __future__ import annotations

import pytest

from kvtool.core.corpus.readers.document import Document, EmptyFile, UnreadableFile
from kvtool.core.corpus.readers.rtf import read
from tests.wording import refused

FONTS = (
    r"{\fonttbl{\f0\fcharset0 Serif;}{\f1\fcharset204 Cyr;}{\f2\fcharset128 Mincho;}{\f3\fcharset129 Batang;}"
    r"{\f4\fcharset2 Symbol;}}"
)


def document(body: str) -> Document:
    (made,) = read("/in/a.rtf", (r"{\rtf1\ansi\ansicpg1252\deff0" + FONTS + body + "}").encode("latin-1"))
    return made


def lines(body: str) -> list[str]:
    return [line for line in document(body).text.split("\n") if line]


def test_notes_and_margins() -> None:
    body = (
        r"The toll is 4 crowns{\super\chftn}{\footnote {\super\chftn} Sundays: free.} a day"
        r"{\footnote\ftnalt Since 1904.}.\par Next{\footnote {\b Second} note}\par"
    )
    assert lines(body) == [
        "The toll is 4 crowns[1] a day[endnote 1].",
        "[1] Sundays: free.",
        "[endnote 1] Since 1904.",
        "Next[2]",
        "[2] Second note",
    ]
    assert [mark.place for mark in document(body).marks] == ["¶ 1", "¶ 2"]
    made = document(r"{\headerl Permit 88\par}{\headerr Permit 88}{\footer until May}Body\par")
    assert made.text == "Permit 88\n\nBody\n\nuntil May\n"
    assert [mark.place for mark in made.marks] == ["header", "¶ 1", "footer"]


def test_comments_and_text_boxes() -> None:
    body = r"Open{\*\atnid AB}{\*\atnauthor Ann Brook}\chatn{\*\annotation{\*\atndate 12}Until when?} daily\par"
    assert lines(body) == ["Open daily", "[comment by Ann Brook: Until when?]"]
    shape = (
        r"{\shp{\*\shpinst{\sp{\sn wzName}{\sv Box 1}}{\shptxt \pard Call the pilot\par}}"
        r"{\shprslt{\*\do{\dptxbxtext Call the pilot\par}}}}"
    )
    assert lines(rf"Before {shape}after\par") == ["Before after", "Call the pilot"]


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (r"\u-10178?\u-8384? tide", "🭀 tide"),
        (r"\uc2\u24180\'94\'4e abc", "年 abc"),
        (r"\uc0\u233 t\u233 ", "été"),
        (r"{\uc0 \u233 }\u233?t", "éét"),
        (r"{\f1\'cf\'f0\'e8\'e2\'e5\'f2} caf\'e9", "Привет café"),
        (r"{\f2\'83e\'83X\'83\'67}", "テスト"),
        (r"{\f3\'b5\'ee\'b4\'eb}", "등대"),
        (r"\ldblquote a\rdblquote\emdash\bullet\~b\_c\-d", "“a”—•\xa0b\u2011cd"),
        (r"a\{b\}\\c", r"a{b}\c"),
        (r"10{\super 6} m, H{\sub 2}O", "10^6 m, H2O"),
        (
            r"toll{\super 3}, 1987{\super 4 }a, m{\up6\fs16 2}{\up0 2}, x{\dn4 i}, {\super 3}",
            "toll[3], 1987[4] a, m^22, x_i, 3",
        ),
        (r"{\upr{Caf?}{\*\ud{Caf\u233?}}} au lait", "Café au lait"),
        (r"{\info{\upr{T?}{\*\ud{T\u233?}}}}text", "text"),
        (r"kept {\deleted gone }{\revised added}", "kept added"),
        (r"{\field{\*\fldinst HYPERLINK http://a.example/}{\fldrslt the chart}}", "the chart"),
        (r"{\pict\bin5 }}}}}}after", "after"),
        (r"{\object{\*\objclass X}{\*\objdata 0102}{\result shown}}", "shown"),
        (r"{\*\unheard of}{\xe{\v entry}}{\info{\title T}}text", "text"),
        (r"{\listtext\f4\'b7\tab}first", "·\tfirst"),
        (r"{\pntext 3.\tab}third", "3.\tthird"),
    ],
)
def test_control_words(written: str, read_as: str) -> None:
    assert document(written + r"\par").text == read_as + "\n"


def test_embedded_objects_are_counted_and_hidden_text_is_quoted() -> None:
    made = document(r"See {\object{\*\objdata 01}}{\object{\*\objdata 02}}{\v the secret} end\par")
    assert made.text == "See the secret end\n"
    assert made.notes == ("hidden text 'the secret': read like those that are shown", "embedded objects: 2 not read")


def test_code_page_of_a_file_and_deep_groups() -> None:
    (made,) = read("/in/a.rtf", rb"{\rtf1\ansi\ansicpg1250 \'9alechta \'f8eka}")
    assert made.text == "šlechta řeka\n"
    assert document("{" * 20_000 + "deep" + "}" * 20_000).text == "deep\n"


def test_tables() -> None:
    table = (
        r"\trowd\cellx1\cellx2\cellx3\intbl Alder\cell\cell 7\cell\row\trowd\intbl\cell b\cell\cell\row\pard end\par"
    )
    assert lines(table) == ["Alder |  | 7", " | b", "end"]
    assert lines(r"\trowd\intbl one\par two\cell three\cell\row\pard") == ["one two | three"]
    inner = r"\itap2 a\nestcell b\nestcell{\*\nesttableprops\trowd\cellx1\cellx2\nestrow}{\nonesttables\par}"
    assert lines(r"\trowd\cellx1\cellx2\intbl " + inner + r"\itap1 x\cell y\cell\row\pard") == ["a, b, ; x | y"]


@pytest.mark.parametrize(
    "body", [r"{\b{\i text", r"text}}}}", r"text\'", r"text\bin9999999999", "text\\", r"\u99999999999?text"]
)
def test_a_damaged_file_keeps_its_text(body: str) -> None:
    (made,) = read("/in/a.rtf", (r"{\rtf1 " + body).encode())
    assert "text" in made.text


def test_a_file_without_text_is_refused() -> None:
    with pytest.raises(EmptyFile):
        read("/in/a.rtf", rb"{\rtf1{\fonttbl{\f0 A;}}}")
    with refused(UnreadableFile):
        read("/in/a.rtf", b"plain")
