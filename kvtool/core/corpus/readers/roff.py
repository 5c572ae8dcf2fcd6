"""Manual pages in roff (macros `man` and `mdoc`) → their text: sections as headings, without requests and fonts."""

from __future__ import annotations

import re
import unicodedata

from kvtool.core.corpus.readers.document import Document, Parts
from kvtool.core.corpus.readers.encoding import of_text

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
_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", ":": "\u0308", "~": "\u0303", ",": "\u0327"}


def is_page(text: str) -> bool:
    """Return True if a text is a manual page: its first line is a request or a comment, and a title comes soon."""
    return text.lstrip().startswith((".", "'\\\"", '\\"')) and _PAGE.search(text[:_BEGINNING]) is not None


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Read one document, marked with the lines of the file."""
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
    """Return what is printed of a request's arguments; of one of roff itself (lower case) nothing is."""
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
    if len(name) == 2 and name[0] in _ACCENTS and name[1].isalpha():
        return unicodedata.normalize("NFC", name[1] + _ACCENTS[name[0]])
    return _CHARACTERS.get(name, "")
