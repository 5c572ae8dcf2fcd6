"""Documents of others, byte by byte: every reader, the guess of an encoding, the split, ignore files, questions."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from kvtool.core.common.marks import place_of, start_of
from kvtool.core.corpus.ignoring import Rules
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.encoding import decode
from kvtool.core.corpus.reading import MOST_TEXT, _answer, _documents
from kvtool.core.corpus.split import METHODS, SplitSettings, split
from kvtool.core.errors import UsageError
from kvtool.core.query.reply import read_batch
from kvtool.core.retrieval.passages import title_of
from kvtool.core.retrieval.terms import asked_terms, language_of, terms
from tests.support.office.facts import facts
from tests.support.office.writers import WRITERS

Target = Callable[[bytes], None]

_SECONDS = 2.0  # of processor time for one input
_HERE = {
    **{"text": "a.txt", "markdown": "a.md", "jsonl": "a.jsonl", "unknown": "a.1", "json": "a.json", "xml": "a.xml"},
    "calendar": "a.ics",
}
_APART = {
    **{"html": "a.html", "mail": "a.eml", "mailbox": "a.mbox", "notebook": "a.ipynb", "pdf": "a.pdf"},
    **{"rtf": "a.rtf", "saved_page": "a.mhtml"},
}
_PACKED = {  # ending → the member that holds the text
    "docx": "word/document.xml",
    "pptx": "ppt/slides/slide1.xml",
    "xlsx": "xl/worksheets/sheet1.xml",
    "odt": "content.xml",
    "epub": "META-INF/container.xml",
}
_KINDS = ("text", "markdown", "html", "code")
_FOLDER = Path(__file__).parents[1] / "corpus" / "cases"
_GROWN = 60_000  # bytes
_WIDEST = 16  # characters of text for a byte of a file that is not packed: numbered items of a deep list are widest


def _timed(target: Target) -> Target:
    """A target that also fails where an input takes too long."""

    @functools.wraps(target)
    def run(data: bytes) -> None:
        begun = time.process_time()
        target(data)
        assert time.process_time() - begun < _SECONDS, f"{len(data)} bytes take too long"

    return run


def _check(documents: Sequence[Document], most: int) -> None:
    """What every document promises: text that can be encoded, no larger than bounded, with marks in order."""
    assert documents
    assert len({document.source for document in documents}) == len(documents)
    for document in documents:
        text, starts = document.text, [mark.start for mark in document.marks]
        assert text.strip()
        assert text.encode(), document.source.encode()
        assert starts == sorted(starts)
        assert all(0 <= start < len(text) for start in starts)
        assert document.kind in _KINDS
        place_of(text, document.marks, 0, len(text))
        start_of(text, document.marks, 2)
    assert sum(len(document.text) for document in documents) <= most


def _read_here(name: str) -> Target:
    """A reader that runs in kvtool's own process: it raises nothing but that a file cannot be read."""

    def run(data: bytes) -> None:
        with contextlib.suppress(UnreadableFile):
            _check(read_documents(Path("/in") / name, data), _WIDEST * len(data) + 1000)

    return _timed(run)


def _read_apart(name: str, pack: Callable[[bytes], bytes] = bytes) -> Target:
    """Read in a process of its own: the answer is sound, whatever the reader's library does."""

    def run(data: bytes) -> None:
        answer = json.loads(json.dumps(_answer(Path("/in") / name, pack(data), MOST_TEXT)))
        with contextlib.suppress(UnreadableFile):
            _check(_documents(answer), MOST_TEXT)

    return _timed(run)


def _packed(ending: str) -> Callable[[bytes], bytes]:
    """What makes a file of a member's bytes: the other members are sound. A whole ZIP file stays as it is."""

    def pack(data: bytes) -> bytes:
        if data.startswith(b"PK"):
            return data
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(_sound(ending))) as sound, zipfile.ZipFile(made, "w") as new:
            for name in sound.namelist():
                new.writestr(name, data if name == _PACKED[ending] else sound.read(name))
        return made.getvalue()

    return pack


def _encoding(data: bytes) -> None:
    """The first line is the encoding that a file says it has."""
    declared, _, body = data.partition(b"\n")
    with contextlib.suppress(UnreadableFile):
        text, notes = decode(body, declared.decode("ascii", "replace"))
        assert "\0" not in text
        assert len(text.encode()) <= 8 * len(body)
        assert all(note.isprintable() for note in notes)


def _split(data: bytes) -> None:
    """The first three bytes choose method, kind and the longest chunk, and how a tokenizer counts."""
    choice, text = data[:3].ljust(3, b"\0"), data[3:].decode("utf-8", "replace")
    method = list(METHODS)[choice[0] % len(METHODS)]
    most, kind, seen = 1 + choice[1] % 100, _KINDS[choice[2] % 4], 0
    per = 1 + choice[2] // 4 % 8

    def count(pieces: Sequence[str]) -> list[int]:
        nonlocal seen
        seen += sum(map(len, pieces))
        return [-(-len(piece) // per) for piece in pieces]

    spans = split(text, SplitSettings(method, most), count, kind)
    assert seen <= 20 * len(text)
    assert bool(spans) == bool(text.strip())
    edges = [0, *(span.end for span in spans)]
    assert not spans or (edges[-1] == len(text) and edges[:-1] == [span.start for span in spans])
    for start, end in itertools.pairwise(edges):
        piece = text[start:end].strip()
        assert piece
        assert len(piece) == 1 or -(-len(piece) // per) <= most
    language = language_of(text)
    words, wholes = terms(text, language)
    assert sum(map(len, words + wholes)) <= 40 * len(text)  # NFKC makes 18 characters of one
    assert {*words, *wholes} == {*itertools.chain(*asked_terms(text, (language,)))}
    assert len(title_of(text)) <= 120


def _ignore(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / ".kvtoolignore").write_bytes(data)
        rules = Rules().below(folder)
        for name in ("a" * 250, "a/" * 40 + "b", ".gitignore", "b.md", "ab/" * 12 + "a", "\udcff"):
            rules.names(folder / name, False)


def _questions(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "questions.jsonl"
        path.write_bytes(data)
        with contextlib.suppress(UsageError):
            for request in read_batch(path):
                assert len(repr(asdict(request))) <= 20 * len(data) + 1000


def _grown(data: bytes) -> None:
    """Read a short piece, many times: more than linear time shows at a length that a fuzzer does not reach. The first
    byte chooses the reader; NUL separates the piece from the text before and after it."""
    names = [*_HERE.values(), _APART["html"]]
    name = names[data[0] % len(names)] if data else "a.txt"
    before, piece, behind, *_ = [*data[1:].split(b"\0"), b"", b"", b""]
    grown = before[:64] + piece[:64] * (_GROWN // max(1, len(piece[:64]))) + behind[:64]
    with contextlib.suppress(UnreadableFile):
        documents = read_documents(Path("/in") / name, grown)
        for document in documents[:1]:
            split(
                document.text, SplitSettings(), lambda pieces: [len(piece) // 3 + 1 for piece in pieces], document.kind
            )


@functools.cache
def _sound(ending: str) -> bytes:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / f"a.{ending}"
        WRITERS[ending](path, next(facts("en")))
        return path.read_bytes()


def _member(ending: str) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(_sound(ending))) as sound:
        return [sound.read(_PACKED[ending]), _sound(ending)]


def _texts() -> list[bytes]:
    korean = "오늘은 날씨가 참 좋습니다. 산책을 나갔다."
    texts = [b"A mill. It stands!\n\n1.1 Scope\n\nOne, two: three", korean.encode(), korean.encode("cp949")]
    return [
        *texts,
        "Le café est très bon".encode("utf-16"),
        "Włochy żółć".encode("cp1250"),
        "Привет, мир".encode("koi8-r"),
    ]


_CASES = {"json": "json", "xml": "xml", "calendar": "ics", "saved_page": "mhtml", "jsonl": "jsonl"}
_CASES |= {"mail": "eml", "notebook": "ipynb"}


def _cases(ending: str) -> list[bytes]:
    """Files that readers once got wrong."""
    return [path.read_bytes() for path in sorted(_FOLDER.glob(f"*.{ending}"))]


_SEEDS: dict[str, list[bytes]] = {
    "html": [
        b"<!doctype html><html><head><meta charset=utf-8><title>T</title></head><body><h1>A</h1><p>b &amp; &#65;<br>c"
        b"<ul><li>one<ol><li>two</ol></ul><table><tr><td>x<th>y</table><pre> z</pre><nav>n</nav><script>s</script>",
        b'<![if x]><!-- c --><a title="b\'" hidden>q</a><svg>u</svg><?php ?>&#x41;&nGt;',
        b'<table><caption>c<tr><th rowspan=2>a<th colspan="3">b<tr><td><table><td>n</table></table>'
        b'<img alt="i" width=9>'
        b"10<sup>6</sup>x<sub>i</sub><ruby>w<rp>(<rt>r</ruby><math><msup><mi>x</mi><mn>2</mn></msup></math>"
        b"<input value=v><input type=radio checked><select><option>o<option selected>p</select>"
        b"<ol start=3><li value=7>q",
    ],
    "unknown": [b'.\\"\n.TH A 1\n.SH B\nc\n', b"#!/bin/sh\necho a\n", b"A licence.\n\nOf two parts.\n"],
    "mailbox": [b"From a\nSubject: one\n\nbody\n\nFrom b\nMessage-ID: <x>\nContent-Type: text/html\n\n<b>two</b>\n"],
    "encoding": [name.encode() + b"\n" + text for name in ("cp1252", "utf-7", "iso2022_jp", "") for text in _texts()],
    "split": [
        bytes((method, 20, kind)) + text
        for method in range(4)
        for kind, text in enumerate(
            (*_texts()[:2], b"# A\n\n| a | b |\n|--|--|\n```\nx = 1\n```\n- one\n- two", b"if a:\n b\n")
        )
    ],
    "ignore": [b"# made\n*.log\n!keep.log\n/build/\na/**/b\n**/x?[a-c]*y\n\\#z\n", b"*a*a*b\n**/a/**/b/**\n"],
    "grown": [
        bytes((reader,)) + begin + b"\0" + piece + b"\0" + end
        for reader, (begin, piece, end) in itertools.product(
            range(8), [(b'{"id":', b"[", b"}"), (b"<p>", b"<li>a", b"-->")]
        )
    ],
    "question_file": [
        b'{"question": "Who?", "id": 1, "answers": ["a"], "chunks": ["00"], "documents": ["d"], "sources": ["s"]}\n',
        b'\xef\xbb\xbf{"question": "Who?", "made_by": "m"}\r\n\r\n{"chunks": [{"id": "'
        + b"ab" * 20
        + b'"}], "time": 1e3}\n',
    ],
}

_MADE: dict[str, Callable[[], list[bytes]]] = {
    **dict.fromkeys(("text", "markdown"), _texts),
    **{ending: functools.partial(_member, ending) for ending in _PACKED},
    **{ending: lambda ending=ending: [_sound(ending)] for ending in ("pdf", "rtf")},
    **{name: functools.partial(_cases, ending) for name, ending in _CASES.items()},
}

TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    name: (target, _MADE.get(name) or functools.partial(list, _SEEDS[name]))
    for name, target in (
        *((name, _read_here(file)) for name, file in _HERE.items()),
        *((name, _read_apart(file)) for name, file in _APART.items()),
        *((ending, _read_apart(f"a.{ending}", _packed(ending))) for ending in _PACKED),
        *(("encoding", _timed(_encoding)), ("split", _timed(_split)), ("grown", _timed(_grown))),
        *(("ignore", _timed(_ignore)), ("question_file", _timed(_questions))),
    )
}
