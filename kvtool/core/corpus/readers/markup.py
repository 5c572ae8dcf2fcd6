"""Small formats: manual pages in roff (macros `man` and `mdoc`), LaTeX, subtitles (SubRip and WebVTT), SVG."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator

from kvtool.core.corpus.readers.containers import parsed_xml
from kvtool.core.corpus.readers.document import Document, Parts, cleaned, joined, shortened_references
from kvtool.core.corpus.readers.encoding import of_text
from kvtool.core.corpus.readers.text import document_of

_BEGINNING = 20_000  # characters in which a page has its title or first section
_PAGE = re.compile(r"^\.[ \t]*(?:TH|Dd|SH|Sh)\b", re.MULTILINE)
_REQUEST = re.compile(r"[.'][ \t]*(\.|[A-Za-z]*)(?![A-Za-z])[ \t]*(.*)", re.DOTALL)
_WORD = re.compile(r'"([^"]*)"?|(\S+)')
_HEADINGS = {"TH": "#", "Dt": "#", "SH": "#", "Sh": "#", "SS": "##", "Ss": "##"}
_BREAKS = frozenset("P PP LP Pp TP TQ HP IP It RS RE Bl El Bd Ed EX EE SY YS Sp Vb Ve br sp".split())
_SILENT = frozenset("P PP LP Pp TP TQ HP RS RE Bl El Bd Ed EX EE YS Sp Vb Ve PD UC AT IX DT TS TE Os Dd ME UE".split())
_CLOSE = frozenset("BI BR IB IR RB RI SY".split())  # whose words have no space between them
_MDOC = frozenset("Fl Ar Op Cm Pa Xr Nm Ns Ic Li Sy Em Dq Sq Pq Ql Qq Oo Oc Dv Ev Fn Fa Ft Va Ad An".split())
_ESCAPE = re.compile(  # names are short: what opens without an end is not looked for to the end of the file
    r"\\(?:[fFmM](?:\[[^\]\n]{0,60}\]|\(..|.)|s[-+]?\d{0,2}|[hvwlL]'[^'\n]{0,60}'|\*?(?:\((..)|\[([^\]\n]{0,60})\])"
    r"|\*.|(.?))",
    re.DOTALL,
)
_CHARACTERS = {
    **{"aq": "'", "cq": "’", "oq": "‘", "lq": "“", "rq": "”", "dq": '"', "em": "—", "en": "–", "bu": "•", "co": "©"},
    **{"<=": "≤", ">=": "≥", "->": "→", "<-": "←", "de": "°", "ha": "^", "ti": "~", "ga": "`", "rs": "\\", "mu": "×"},
    **{"sh": "#", "at": "@", "lB": "[", "rB": "]", "ba": "|", "Eu": "€", "ss": "ß", 'L"': '"', 'R"': '"', "--": "—"},
    **{"e": "\\", "E": "\\", "-": "-", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", "t": "\t", ".": "."},
}
_ACCENTS = {  # what LaTeX and roff name → the mark that Unicode puts after the letter
    **{"`": "\u0300", "'": "\u0301", "^": "\u0302", "~": "\u0303", '"': "\u0308", "=": "\u0304", ".": "\u0307"},
    **{"H": "\u030b", "c": "\u0327", "u": "\u0306", "v": "\u030c", "d": "\u0323", "b": "\u0331", "k": "\u0328"},
    **{"r": "\u030a", ":": "\u0308", ",": "\u0327"},
}
_ACCENT = re.compile(
    r"\\(?:([`'^~\"=.])[ \t]*|([Hcuvdbkr])(?=[ \t{]|\\[ij])[ \t]*)"
    r"(?:\{[ \t]*(\\?[A-Za-z])[ \t]*\}|(\\[ij](?![A-Za-z])|[A-Za-z]))"
)
_LETTERS = {
    **{"ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø"},
    **{"l": "ł", "L": "Ł", "aa": "å", "AA": "Å"},
}
_NAMES = "|".join(_LETTERS)
_LETTER = re.compile(rf"\{{\\({_NAMES})\}}|\\({_NAMES})(?![A-Za-z])(?:\{{\}}|[ \t]+)?")
_SECTION = re.compile(
    r"^[ \t]*\\(part|chapter|section|subsection|subsubsection|paragraph)\*?(?:\[[^\]\n]*\])?\{([^{}\n]+)\}",
    re.MULTILINE,
)
_RANKS = {"part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4, "paragraph": 5}
# Possessive, and no part of a mark runs over the beginning of another: so each takes linear time on any line.
_TIMES = re.compile(r"\s*+(?:\d++:)?\d++:\d\d[.,]\d++\s++-->\s")
_VOICE = re.compile(r"<v(?:\.[\w.]++)?\s++([^<>]*+)>")
_MARKUP = re.compile(r"</?[a-z][^<>]*+>|<[\d:.]++>|\{\\[^{}]*+\}", re.IGNORECASE)
_SAID = ("title", "desc", "text")


def is_manual(text: str) -> bool:
    return text.lstrip().startswith((".", "'\\\"", '\\"')) and _PAGE.search(text[:_BEGINNING]) is not None


@of_text()
def read_manual(source: str, text: str) -> list[Document]:
    made, paragraph, begun, in_macro = Parts(), list[str](), 1, False
    for number, line in enumerate([*text.split("\n"), ".PP"], 1):
        found = _REQUEST.match(line)
        name, words = (found[1], _words(found[1], found[2])) if found else ("", [_plain(line)])
        in_macro = name != "." and (in_macro or name in ("de", "am", "ig"))
        if in_macro:
            continue
        if name in _HEADINGS or name in _BREAKS or not line.strip():
            made.add(begun, "\n".join(paragraph))
            paragraph = []
        if name in _HEADINGS:
            title = f"{words[0]}({words[1]})" if name in ("TH", "Dt") and len(words) > 1 else " ".join(words)
            made.add(number, f"{_HEADINGS[name]} {title}" if title else "")
        elif said := ("" if name in _CLOSE else " ").join(words).rstrip():
            begun = begun if paragraph else number
            paragraph.append(said)
    return [made.document(source, "markdown")]


def _words(name: str, rest: str) -> list[str]:
    if name in _SILENT or not name[:1].isupper():
        return []
    words = [_plain(found[1] if found[2] is None else found[2]) for found in _WORD.finditer(rest.partition('\\"')[0])]
    if name == "IP":
        return words[:1]
    if name[1:].islower():  # mdoc: arguments are macros, too
        flags = {number for number, word in enumerate([name, *words]) if word == "Fl"}
        words = [f"-{word}" if at in flags else word for at, word in enumerate(words)]
        words = [word for word in words if word not in _MDOC]
    return words


def _plain(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    name = found[1] or found[2] or found[3] or ""
    if len(name) == 2 and name[0] in _ACCENTS and not name[0].isalpha() and name[1].isalpha():
        return _accented(name[0], name[1])
    return _CHARACTERS.get(name, "")


def _accented(accent: str, letter: str) -> str:
    return unicodedata.normalize("NFC", letter + _ACCENTS[accent])


@of_text()
def read_latex(source: str, text: str) -> list[Document]:
    text = _ACCENT.sub(lambda found: _accented(found[1] or found[2], (found[3] or found[4]).lstrip("\\")), text)
    text = _LETTER.sub(lambda found: _LETTERS[found[1] or found[2]], text)
    text = _SECTION.sub(lambda found: f"{'#' * _RANKS[found[1]]} {found[2]}", text)
    return document_of(source, text, "markdown")


@of_text()
def read_subtitles(source: str, text: str) -> list[Document]:
    return [joined(source, "text", _spoken(text), gap="\n")]


def _spoken(text: str) -> Iterator[tuple[int, str]]:
    inside = False
    for number, line in enumerate(cleaned(text).split("\n"), 1):
        if _TIMES.match(line):
            inside = True
        elif not line.strip():
            inside = False
        elif inside:
            plain = _MARKUP.sub("", _VOICE.sub(r"\1: ", line))
            yield number, html.unescape(shortened_references(plain)).strip()


def read_svg(source: str, data: bytes) -> list[Document]:
    drawing = parsed_xml(data, "the drawing")
    said = (element for element in drawing.iter() if str(element.tag).rpartition("}")[2] in _SAID)
    labels = (" ".join("".join(element.itertext()).split()) for element in said)
    return [joined(source, "text", ((f"label {number}", label) for number, label in enumerate(labels, 1)), gap="\n")]
