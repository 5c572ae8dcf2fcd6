"""Document that a reader returns, and the errors for a file that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtool.core.common.marks import Mark
from kvtool.core.common.plugins import extra_line
from kvtool.core.errors import KvtoolError

_MOST_NAMES, _LONGEST_NAME, _MOST_NOTES = 10, 60, 20
EXTRA = extra_line("documents")
_REFERENCE = re.compile("&#(0*+)([0-9]{8,}+;?)?")
_DATA_URI = re.compile(  # linear: possessive, and no part is tried again
    r"data:(?:(\w{1,20}+)\\?/[\w.+-]{1,100}+)?(?:;(?!base64,)[\w.=+-]{1,100}+){0,9}+(?:;base64,(?:[\w+/=%-]++|\\[/nr]|"
    r"[ \t]*+\r?\n[ \t]*+(?=[\w+/]{60}|[\w+/]*+={0,2}+[)\"'>\]]))*+|,[^\s\"'<>()\\]++)",
    re.IGNORECASE | re.ASCII,
)
_BASE64 = re.compile(
    r"(?<=[\">:\s])(?:(?:[\w+/-]|\\/){60,}+(?:\s|\\[nr])*+)++(?:[\w+/-]*+={0,2}(?=\s*+[\"<]))?", re.ASCII
)
_PICTURES = ("iVBOR", "/9j/", "\\/9j", "R0lGOD", "UklGR", "PHN2Z")  # how PNG, JPEG, GIF, WebP and SVG begin
_SHORTEST_URI, _SHORTEST_BASE64 = 200, 1000  # characters
EMBEDDED = "[data]"  # stands for embedded data that may hold text
_UNWANTED = re.compile("[\0-\b\v\f\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    source: str
    text: str
    kind: str
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class UnreadableFile(KvtoolError):
    """A file holds no text that can be read; the message is the reason, without the path."""

    def to_row(self) -> dict[str, str]:
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_row(row: Mapping[str, str]) -> UnreadableFile:
        kinds = {kind.__name__: kind for kind in UnreadableFile.__subclasses__()}
        return kinds.get(row["error"], UnreadableFile)(row["message"], row["hint"])


class EmptyFile(UnreadableFile):
    """The error for a file without content."""


class BinaryFile(UnreadableFile):
    """The error for a file that is no text."""


class SecretFile(UnreadableFile):
    """The error for a file that holds keys or passwords."""


class PassingFailure(UnreadableFile):
    """The error of a reader that may succeed when it is tried again with the unchanged file."""


class MissingPackage(UnreadableFile):
    """The error for a file whose reader needs a package that is not installed."""


def hidden_note(kind: str, names: Sequence[object]) -> tuple[str, ...]:
    if not names:
        return ()
    shown = ", ".join(repr(name)[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (f"hidden {kind}{'s' if len(names) > 1 else ''} {shown}{more}: read like those that are shown",)


def unread_note(counts: Mapping[str, int]) -> tuple[str, ...]:
    shown = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
    return (f"{shown} not read",) if shown else ()


def shortened(notes: Sequence[str]) -> tuple[str, ...]:
    more = len(notes) - _MOST_NOTES
    return (*notes[:_MOST_NOTES], *([f"and {more} more like these"] if more > 0 else []))


def table_row(cells: Iterable[str]) -> str:
    """Write a table's row as one line, `a | b |  | d`; an empty cell keeps its column, except at the row's end."""
    return " | ".join(" ".join(cell.split()) for cell in cells).rstrip(" |")


class Grid:
    """Rows of a table whose cells (text, columns, rows) repeat their text in all that they cover, unless it is long."""

    def __init__(self, longest_label: int) -> None:
        self.covered: dict[int, tuple[int, str]] = {}  # column → rows that a cell above still covers, its label
        self._longest = longest_label

    def row(self, cells: Iterable[tuple[str, int, int]]) -> str:
        texts = {column: text for column, (_, text) in self.covered.items()}
        self.covered = {column: (left - 1, text) for column, (left, text) in self.covered.items() if left > 1}
        column = 0
        for text, width, height in cells:
            while column in texts:
                column += 1
            for covered in range(column, column + max(1, width)):
                texts[covered] = text
                text = text if len(text) <= self._longest else ""
                if height > 1:
                    self.covered[covered] = height - 1, text
        return table_row(texts.get(column, "") for column in range(max(texts, default=-1) + 1))


@contextmanager
def opened(what: str, library: str) -> Iterator[None]:
    """Turn whatever a format's library raises, also when it is imported, into UnreadableFile."""
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"{library} is not installed", EXTRA) from error
    except (UnreadableFile, MemoryError, RecursionError):
        raise
    except Exception as error:
        if re.search("encrypted|password", str(error)):
            raise UnreadableFile("protected by a password", "save a copy without one") from error
        raise UnreadableFile(f"damaged: no {what} that can be opened ({type(error).__name__})") from error


def cleaned(text: str) -> str:
    return _UNWANTED.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def without_data_uris(text: str, *, base64: bool = False) -> str:
    """Replace long data URIs by `[image]` or `[data]`, but for their newlines; `base64`: also other long runs."""
    text = _DATA_URI.sub(_placeholder, text) if "data:" in text.lower() else text
    return _BASE64.sub(_placeholder, text) if base64 else text


def _placeholder(found: re.Match[str]) -> str:
    whole = found[0]
    if found.re is _DATA_URI:
        picture = str(found[1]).lower() == "image"
        keep = len(whole) < _SHORTEST_URI or not (found[1] or ";base64," in whole)  # a cell may say `data:`
    else:
        picture = whole.startswith(_PICTURES)
        keep = len(whole) < _SHORTEST_BASE64 or not all(re.search(kind, whole) for kind in ("[a-z]", "[A-Z]", r"\d"))
    return whole if keep else ("[image]" if picture else EMBEDDED) + "\n" * whole.count("\n")


def embedded_note(before: str, after: str) -> tuple[str, ...]:
    return unread_note({"embedded data": after.count(EMBEDDED) - before.count(EMBEDDED)})


def shortened_references(text: str) -> str:
    """Shorten numbers of HTML's references (`&#65;`): the standard library fails at 4,300 digits."""
    return _REFERENCE.sub(lambda found: "\ufffd" if found[2] else f"&#{found[1][:1]}", text)


class Parts:
    def __init__(self, gap: str = "\n\n") -> None:
        self.gap = gap
        self._texts: list[str] = []
        self._marks: list[Mark] = []
        self._length = 0
        self._after_row = False  # the last part is a row of a table
        self._embedded = 0  # data URIs left out

    def add(self, place: int | str, text: str, gap: str | None = None) -> None:
        text = self.without_data(cleaned(text)).strip("\n")
        first, line_end, more = text.partition("\n")
        is_row, after_row = " | " in first and (not more or more[0] == "\n"), self._after_row
        self._after_row = is_row and not line_end
        if not text.strip():
            return
        if self._texts:
            usual = "\n" if after_row and is_row else self.gap
            text = (usual if gap is None else gap) + text
        if not self._marks or self._marks[-1].place != place:
            self._marks.append(Mark(self._length + len(text) - len(text.lstrip("\n")), place))
        self._texts.append(text)
        self._length += len(text)

    def without_data(self, text: str) -> str:
        cut = without_data_uris(text)
        self._embedded += cut.count(EMBEDDED) - text.count(EMBEDDED)
        return cut

    def document(self, source: str, kind: str, notes: tuple[str, ...] = ()) -> Document:
        notes += unread_note({"embedded data": self._embedded})
        if not self._texts:
            raise EmptyFile("; ".join(("empty: there is no text in it", *notes)))
        return Document(source, "".join(self._texts) + "\n", kind, notes, tuple(self._marks))


def joined(
    source: str, kind: str, parts: Iterable[tuple[int | str, str]], gap: str = "\n\n", notes: tuple[str, ...] = ()
) -> Document:
    made = Parts(gap)
    for place, text in parts:
        made.add(place, text)
    return made.document(source, kind, notes)


def numbered(source: str, kind: str, label: str, texts: Iterable[str], notes: tuple[str, ...] = ()) -> Document:
    """Make a document of parts that are called `label 1`, `label 2`, …; parts without text count, too."""
    parts = ((f"{label} {number}", text) for number, text in enumerate(texts, 1))
    return joined(source, kind, parts, notes=notes)
