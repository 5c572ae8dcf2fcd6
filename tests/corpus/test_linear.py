"""Documents of others take time linear in their length: a reader, an ignore file, a place, the split."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pathspec import GitIgnoreSpec

from kvtool.core.common.marks import Mark, place_of
from kvtool.core.corpus import reading as reading_module
from kvtool.core.corpus.ignoring import _linear
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.reading import Reading
from kvtool.core.corpus.split import METHODS, SplitSettings, split
from kvtool.core.errors import KvtoolError

ROOT = Path(__file__).parents[2]
GUARD = 120.0  # seconds, for what takes two or three; where time is quadratic it takes many minutes
LENGTH = 400_000  # bytes of a hostile file

# file ending → what the file begins with, and what it then repeats
HOSTILE = {
    ".jsonl": ("", ['{"text":"a"}\n', '{"id":"line 1","text":"a"}\n', "[", '{"', "\\"]),
    ".html": (
        "<p>a",
        [
            *("<a \"'", "<a \"<a '", "<!--", "<![", "<!doctype ", "<?", "</", "&#9", "<ul><li>a", "<td>a", "<"),
            *("<td><div>", "<ol><li><p>", "<title>"),
        ],
    ),
    ".htm": (
        '<a x="">',
        [
            *("<a \" ='", '<a " =">', '<a " b="c>', "<!-->", "<script>", "<table><td>", "<td rowspan=0 colspan=99>a"),
            *("<tr><td rowspan=0>a", "<sup>a", "<ruby>a<rt>b", "<select><option>a", "<math><msup>", "<img alt='a'>"),
        ],
    ),
    ".json": ('"data:image/png;base64,', ["a", "\\", "\\/", "data:a/b;", "\\ud800", "\n", 'a" ', "data:;base64,"]),
    ".xml": (">", ["&#1", "&a", "&", "a" * 61 + "\n", " "]),
    ".ics": ("A;QUOTED-PRINTABLE:", ["\n a", "=\n", "QUOTED-PRINTABLE", ":", "\\n", "\n"]),
    ".txt": ("a", ["\ud7ff", "\n", " "]),
}


def in_time(program: str) -> None:
    """Run a program of Python within the guard: only the end of its process interrupts a regular expression."""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=GUARD)


@pytest.mark.some(1)
@pytest.mark.parametrize("ending", HOSTILE)
def test_readers(ending: str) -> None:
    in_time(f"from tests.corpus import test_linear\ntest_linear.read_hostile({ending!r})")


def read_hostile(ending: str) -> None:
    begin, units = HOSTILE[ending]
    for unit in units:
        with suppress(KvtoolError):
            read_documents(Path("/in/a" + ending), (begin + unit * (LENGTH // len(unit))).encode())


def test_a_number_of_any_length() -> None:
    """The standard library raised a ValueError for a reference of over 4,300 digits."""
    for digits, shown in (("9" * 5000, "\ufffd"), ("0" * 5000 + "65", "A"), ("0" * 5000, "\ufffd"), ("65", "A")):
        (page,) = read_documents(Path("/in/a.html"), f"<p>x &#{digits}; y".encode())
        assert page.text == f"x {shown} y\n"


def test_ignore_files() -> None:
    in_time(
        "import re\nfrom pathlib import Path\nfrom kvtool.core.corpus.ignoring import Rules\n"
        "import tempfile\nfolder = Path(tempfile.mkdtemp())\n"
        "(folder / '.gitignore').write_text('*a' * 40 + 'b\\n' + 'a/**/' * 40 + 'b\\n')\n"
        "rules = Rules().below(folder)\n"
        "assert not rules.names(folder / ('a' * 250), False)\n"
        "assert not rules.names(folder / ('a/' * 1500 + 'a'), False)\n"
        "assert rules.names(folder / ('xa' * 40 + 'b'), False)\n"
        "(folder / '.gitignore').write_text('*' * 500_000 + '\\n' + 'a?' * 100_000 + '\\nb\\n')\n"
        "assert Rules().below(folder).names(folder / 'b', False)\n"
    )


@pytest.mark.slow
def test_patterns_of_ignore_files_mean_what_they_meant() -> None:
    made, matched = random.Random(1), 0
    segments = ["**", "*", "a", "b", "a*", "*b", "*a*", "*a*b", "a?b", "[ab]", "*[ab]*", "?", "*a*a*b", "ab", "a**b"]
    for _ in range(1500):
        pattern = (
            made.choice(["", "/"]) + "/".join(made.choices(segments, k=made.randint(1, 6))) + made.choice(["", "/"])
        )
        parts = ("".join(made.choices("ab", k=made.randint(1, 4))) for _ in range(made.randint(1, 7)))
        path = "/".join(parts) + made.choice(["", "/"])
        for each in GitIgnoreSpec.from_lines([pattern]).patterns:
            if each.regex is not None:
                before, now = (re.search(regex, path) for regex in (each.regex.pattern, _linear(each.regex.pattern)))
                assert (before and before.groupdict()) == (now and now.groupdict()), (pattern, path)
                matched += before is not None
    assert matched > 100


def test_places() -> None:
    in_time(
        "from kvtool.core.common.marks import Mark, place_of\n"
        "label = '1' * 200_000 + 'x'\n"
        "place_of('one two', [Mark(0, label), Mark(4, label + 'y')], 0, 7)\n"
    )
    assert place_of("one two", [Mark(0, "p. 9"), Mark(4, "p. 10")], 0, 7).label == "p. 9–10"
    assert place_of("one two", [Mark(0, "9"), Mark(4, "9" * 5000)], 0, 7).label.startswith("9 – 99")


@pytest.mark.slow
def test_a_long_line_is_split() -> None:
    in_time(
        "from kvtool.core.corpus.split import SplitSettings, split\n"
        "for unit in ('a', '.', '#', ' ', 'a b ', '漢字。仮名'):\n"
        "    split('x' + unit * 200_000 + 'y', SplitSettings(), lambda texts: [len(text) // 3 for text in texts])\n"
    )


@pytest.mark.some(8)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "unit", [".", ", ", "a\u0301", "\u0301", "x", "x\n==\n", "```\n", "# a\n", "\u3000", "一", "1.1 ", "a. b, c\n\n"]
)
def test_the_split_counts_each_character_a_few_times(method: str, unit: str) -> None:
    """A tokenizer sees each a bounded number of times, and no piece that is long, whatever it says of them."""
    text = "a " + unit * (20_000 // len(unit)) + " a"
    for tokens in (len, lambda piece: len(piece) // 3 + 1, lambda piece: piece.count("a") * 50 + 1):
        seen: list[int] = []

        def count(pieces: Sequence[str], tokens: Any = tokens, seen: list[int] = seen) -> list[int]:
            seen.extend(map(len, pieces))
            return [tokens(piece) for piece in pieces]

        spans = split(text, SplitSettings(method, max_tokens=64), count, "text")
        assert (spans[0].start, spans[-1].end) == (0, len(text))
        assert sum(seen) <= 12 * len(text)
        assert max(seen) <= 4100 or not unit.strip()


def test_large_texts_and_pages_are_read_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own bounds their time and memory."""
    given: list[str] = []

    class Recorded(reading_module.Child):
        def ask(self, path: Path, data: bytes) -> dict[str, Any]:
            given.append(path.name)
            return super().ask(path, data)

    monkeypatch.setattr(reading_module, "Child", Recorded)
    large = b"All of it is text.\n" * 60_000
    with Reading() as reading:
        files = {"a.txt": b"text", "b.html": b"<p>text", "c.txt": large, "d.md": large, "e.x": large}
        for name, data in files.items():
            (document,) = reading.documents(Path("/in") / name, data)
            assert document.text.strip()
    assert given == ["b.html", "c.txt", "d.md", "e.x"]
