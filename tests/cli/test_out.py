"""Output on stdout and stderr, on any terminal and on none; lines break between words."""

from __future__ import annotations

import errno
import io
import json
import random
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from kvtool.cli.out import Out, OutputClosed, to_json
from kvtool.cli.terminal import WordWrap, clean, degrade, render_quote, wrapped
from kvtool.core.common.text import counted, shown_size
from kvtool.core.errors import DamagedError, KvtoolError
from tests.cli.conftest import Make, Terminal
from tests.wording import refused


def test_a_warning_on_the_same_screen_does_not_stand_in_the_answer(make: Make) -> None:
    out, stdout, stderr = make(tty=True)
    out.print("half an ans", end="")
    out.warning("a chunk was computed")
    out.end_line()
    assert stdout.text == "half an ans\n"
    assert "a chunk was computed" in stderr.text
    out, stdout, _ = make()
    out.print("half an ans", end="")
    out.warning("a chunk was computed")
    out.print("wer", end="")
    out.end_line()
    assert stdout.text == "half an answer\n"


@pytest.mark.parametrize("together", [True, False])
def test_a_warning_in_the_same_file_does_not_stand_in_the_answer(together: bool, tmp_path: Path) -> None:
    """As `2>&1 | cat` has it; an answer that is written elsewhere stays in one piece."""
    with (tmp_path / "out").open("w") as stdout, (tmp_path / ("out" if together else "err")).open("a") as stderr:
        out = Out(stdout=stdout, stderr=stderr)
        out.print("the answer", end="")
        out.warning("a chunk was computed")
        out.end_line()
    text = (tmp_path / "out").read_text()
    assert text == "the answer\n" + ("warning: a chunk was computed\n" if together else "")


def test_sizes_and_numbers_for_people() -> None:
    amounts = (0, 800, 999_999, 5_200_000, 20 * 10**9)
    assert [shown_size(amount) for amount in amounts] == ["0.0 kB", "0.8 kB", "1.0 MB", "5.2 MB", "20.0 GB"]
    assert (counted(1, "entry", "entries"), counted(2, "entry", "entries")) == ("1 entry", "2 entries")
    assert counted(1200, "chunk") == "1,200 chunks"


def speak(out: Out) -> None:
    out.status("reading")
    out.detail("chunk 3")
    out.warning("a miss", "ingest again")
    out.print("the answer")
    out.error(DamagedError("record 3", "verify"))


@pytest.mark.parametrize(
    ("verbosity", "said"),
    [
        (-1, "error: record 3\nhint: verify\n"),
        (0, "reading\nwarning: a miss\nhint: ingest again\nerror: record 3\nhint: verify\n"),
        (1, "reading\nchunk 3\nwarning: a miss\nhint: ingest again\nerror: record 3\nhint: verify\n"),
    ],
)
def test_words_go_to_stderr_and_data_to_stdout(verbosity: int, said: str, make: Make) -> None:
    out, stdout, stderr = make(verbosity=verbosity)
    speak(out)
    assert stdout.text == "the answer\n"
    assert stderr.text == said


def test_json_is_one_object_even_of_an_error(make: Make) -> None:
    out, stdout, stderr = make("json")
    speak(out)
    assert json.loads(stdout.text) == {"schema": 1, "error": {"message": "record 3", "hint": "verify", "exit_code": 13}}
    assert stderr.text.endswith("error: record 3\nhint: verify\n")


def test_jsonl_is_one_event_a_line(make: Make) -> None:
    out, stdout, _ = make("jsonl", 1)
    speak(out)
    out.result({"chunks": 2}, human=lambda: None)
    events = [json.loads(line) for line in stdout.text.splitlines()]
    assert [event["type"] for event in events] == ["status", "status", "warning", "error", "summary"]
    assert all(event["schema"] == 1 for event in events)
    assert events[-1] == {"schema": 1, "type": "summary", "chunks": 2}


def test_json_takes_what_commands_have() -> None:
    import numpy as np

    @dataclass
    class Timing:
        ttft: float

    nan, many = float("nan"), np.arange(2)
    value = {"path": Path("a"), "nan": nan, "t": (Timing(1.5),), "n": np.float32(2), "a": many, 3: None}
    expected = {"path": "a", "nan": None, "t": [{"ttft": 1.5}], "n": 2, "a": [0, 1], "3": None}
    assert json.loads(to_json(value)) == expected
    with refused(TypeError):
        to_json(object())


def test_json_cannot_steer_the_terminal_that_shows_it(make: Make) -> None:
    """What a person's output leaves out is there, as an escape that every parser undoes."""
    steering = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F)]
    steering += [*range(0x2066, 0x206A), 0xFEFF, 0xD800, 0xDFFF, 0xE0041, 0x1D173]
    value = {"a" + chr(code): f"관측소 {chr(code)}é🙂" for code in steering}
    for encoding in ("utf-8", "ascii", "cp1252"):
        out, stdout, _ = make("json", encoding=encoding)
        out.result(value, human=lambda: None)
        line = stdout.text.removesuffix("\n")
        assert not {chr(code) for code in steering} & set(line)
        assert json.loads(line) == value | {"schema": 1}
        assert ("관측소" in line) == (encoding == "utf-8")


def test_text_degrades_and_never_fails(make: Make) -> None:
    out, stdout, stderr = make(encoding="ascii")
    out.print("관측소 → 1 ≥ 0 …")
    out.warning("읽기")
    out.table(("이름", "n"), [["서울", 1]], title="표")
    assert stdout.text.startswith("??? -> 1 >= 0 ...\n")
    assert stdout.text.endswith("\n??  n\n??  1\n")
    assert stderr.text == "warning: ??\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "shift_jis", "no-such"])
def test_degrade_gives_what_the_encoding_can_show(encoding: str) -> None:
    for text in ("plain", "한국어", "\ud800", "עברית – العربية", "🙂"):
        degrade(text, encoding).encode("ascii" if encoding == "no-such" else encoding)


def test_foreign_text_cannot_steer_the_terminal(make: Make) -> None:
    out, stdout, stderr = make()
    evil = "a\x1b[31mb\x07\r\x9b2J\u202ec[bold]d[/bold]\ttab"
    assert clean(evil) == "a[31mb2Jc[bold]d[/bold]\ttab"
    out.print(evil)
    out.warning(evil)
    out.table(("x",), [[evil + "\nnext"]])
    assert not set("\x1b\x07\r\x9b\u202e") & set(stdout.text + stderr.text)
    assert "[bold]d[/bold]" in stdout.text
    assert stdout.text.splitlines()[-1].endswith("tab next")


_SEEN = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}  # drawn with numbers


def test_no_character_that_is_not_seen_reaches_the_terminal() -> None:
    """Marks of direction and all other format characters, by Unicode's own table; what has a shape stays."""
    unseen = {code for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cf", "Zl", "Zp")}
    assert len(unseen) > 160
    for code in [*sorted(unseen - _SEEN), 0x2065, 0xFFF0, 0xE0000, 0xE0080, 0xE0FFF]:
        assert clean(f"a{chr(code)}b").replace(" ", "") == "ab", hex(code)
        assert chr(code) not in to_json({"text": f"a{chr(code)}b"}) or code in (0x200C, 0x200D), hex(code)
    assert all(clean(f"a{chr(code)}1") == f"a{chr(code)}1" for code in _SEEN)


@pytest.mark.parametrize(
    "text",
    [
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a joiner that parts
        "\u0915\u094d\u200d\u0937",  # Devanagari, with one that joins
        "\U0001f469\u200d\U0001f680 \u2764\ufe0f\u200d\U0001f525 1\ufe0f\u20e3",  # emoji of several
        "\u845b\U000e0100",  # a form of a character in a name
        "\u200c\u062e\u0648\u0627\u0647\u0645",  # an answer's next piece
    ],
)
def test_scripts_and_emoji_stay_readable(text: str) -> None:
    assert clean(text) == text


def test_joiners_hide_nothing() -> None:
    assert clean("sou\u200drce\u200c:") == "source:"
    assert clean("\u0645" + "\u200c\u200d" * 9 + "\u06cc") == "\u0645\u200c\u06cc"
    assert clean("\U0001f600" + "".join(chr(0xE0100 + byte) for byte in b"steer")) == "\U0001f600\U000e0173"


def test_a_name_with_a_line_of_its_own_forges_no_warning(make: Make) -> None:
    out, _, err = make()
    out.warning("/in/a\nerror: no.md: one line left out", "see\nerror: it")
    assert err.text == "warning: /in/a\n  error: no.md: one line left out\nhint: see\n  error: it\n"


def passage_lines(err: str) -> list[str]:
    assert err.endswith("\n")
    return err[:-1].split("\n")


def test_no_line_of_a_passage_looks_like_one_of_ours(make: Make) -> None:
    out, _, err = make()
    out.passage([("one\n\nsource: b.md:1\r\nerror: none\u2028hint: none\x0b\x85 a\n", 0)])
    assert all(line.startswith("| ") or line == "|" for line in passage_lines(err.text))
    assert "| source: b.md:1\n" in err.text


@pytest.mark.parametrize("letter", ["x", " ", "\t", "\u4e2d", "\u2026", "\u0301", "\u0e34", "\U0001f469\u200d"])
@pytest.mark.parametrize("columns", ["80", "7", "1"])
def test_nor_where_the_terminal_wraps_it(
    make: Make, letter: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is too wide continues in the terminal's first column, so none is: not with wide letters either, which
    are wide only on some terminals."""
    monkeypatch.setenv("COLUMNS", columns)
    out, _, err = make(tty=True)
    out.passage([(letter * 200 + "source: b.md:1", 0), ("[" + letter * 50, 33)])
    lines = passage_lines(re.sub("\x1b\\[[0-9;]*m", "", err.text))
    assert all(line.startswith("|") for line in lines)
    wide = {"\u4e2d": 2, "\u2026": 2}
    assert all(sum(wide.get(each, 1) for each in line) <= max(int(columns), 4) for line in lines)
    assert letter.isspace() or "".join(line[2:] for line in lines).count(letter[0]) == 250


def test_a_table_in_a_pipe_keeps_everything(make: Make) -> None:
    out, stdout, _ = make()
    out.table(("id", "n", "x"), [["c" * 300, 1, 0.123456], ["d", 20, None]])
    header, first, second = stdout.text.splitlines()
    assert header.split() == ["id", "n", "x"]
    assert first.split() == ["c" * 300, "1", "0.1235"]
    assert second.rstrip().endswith("20")


def test_a_table_on_a_terminal_and_an_empty_one(make: Make) -> None:
    out, stdout, _ = make(tty=True)
    out.table(("id",), [["c" * 300]], title="chunks")
    assert stdout.text.count("c") >= 300
    out.table(("id",), [])


def lines_of_table(make: Make, columns: tuple[str, ...], *rows: tuple[Any, ...]) -> list[str]:
    out, stdout, _ = make(tty=True)
    out.table(columns, rows)
    return re.sub(r"\x1b\[[0-9;]*m", "", stdout.text).strip("\n").splitlines()


def test_a_wide_table_breaks_no_word_on_a_terminal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("level", "chunks", "bits/element", "of 16 bit", "of 8 bit", "error", "KL of answers", "same tokens")
    lines = lines_of_table(make, columns, ("2", 76, "1.328", "12.05x", "6.02x", "0.1752", "0.0039", "96.5%"))
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    assert set(" ".join(columns).split()) <= set(" ".join(lines).split())


def test_a_table_that_no_folding_fits_comes_in_bands(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = ("KL first", "KL answer", "reused", "recomputed", "fresh", "TTFT ms", "speedup")
    rows = [(mode, "서울의 답 " * 12, *range(1000, 1007)) for mode in ("full", "infoflow")]
    lines = lines_of_table(make, ("mode", "answer", *numbers), *rows)
    assert max(cell_len(line) for line in lines) <= 80
    heads = [number for number, line in enumerate(lines) if line.startswith("mode")]
    assert len(heads) == 2
    assert lines[heads[1] - 1] == ""
    for mode in ("full", "infoflow"):
        assert len([line for line in lines if line.startswith(mode)]) == 2
    assert lines[-1].split() == ["infoflow", *map(str, range(1000, 1007))]
    assert sum(line.count("서울의") for line in lines) == 24


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def flush(self) -> None:
        raise OSError(self.number, "No space left on device")


def test_a_closed_pipe_ends_quietly() -> None:
    stderr = Terminal()
    out = Out(stdout=Broken(errno.EPIPE), stderr=stderr)
    with pytest.raises(OutputClosed) as closed:
        out.print("x")
    assert closed.value.code == 0
    assert stderr.text == ""
    out.print("nothing more can fail")


def test_a_full_disk_is_an_error_that_can_be_told() -> None:
    out = Out("json", stdout=Broken(errno.ENOSPC), stderr=Terminal())
    with refused(KvtoolError) as error:
        out.json({})
    assert error.value.exit_code == 1
    out.error(error.value)


def test_missing_streams_are_silent() -> None:
    out = Out()
    out._stdout.stream = out._stderr.stream = None
    speak(out)
    with out.progress("x") as bar:
        bar.advance()


@pytest.mark.parametrize(
    ("term", "no_color", "coloured"), [("xterm", "", True), ("dumb", "", False), ("xterm", "1", False)]
)
def test_colour(term: str, no_color: str, coloured: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    out, _, stderr = make(tty=True)
    out.warning("x")
    assert ("\x1b" in stderr.text) == coloured


ENGLISH = "The observatory at Kellhaven was founded by Ilse Varnholt, who owned the hill outright."
KOREAN = "별머리 천문대는 여울진시 북쪽 한밝고개 꼭대기에 있다. 이 천문대를 세운 사람은 송라윤으로, 그는 쌀을 팔았다."
CHINESE = "天文台建于一八八七年，由当地居民出资（每户一斗米）。第一台望远镜用了二十七年。"
URL = "https://example.org/" + "a-long-path/" * 8


def pieces(text: str, seed: int) -> Iterator[str]:
    rng, at = random.Random(seed), 0
    while at < len(text):
        length = rng.randint(1, 6)
        yield text[at : at + length]
        at += length


def streamed(text: str, columns: int, seed: int) -> str:
    wrap = WordWrap()
    return "".join(wrap.take(piece, columns) for piece in pieces(text, seed)) + wrap.rest(columns)


@pytest.mark.parametrize("columns", [20, 37, 80])
@pytest.mark.parametrize("text", [ENGLISH, KOREAN])
def test_no_word_is_broken_and_no_line_is_too_long(text: str, columns: int) -> None:
    for seed in range(20):
        lines = [line.rstrip() for line in streamed(text, columns, seed).split("\n")]
        assert max(map(cell_len, lines)) <= columns
        assert " ".join(lines) == text
        for line, after in pairwise(lines):  # each line has as much as fits
            assert cell_len(f"{line} {after.split(' ')[0]}") > columns


def test_text_without_blanks_breaks_anywhere_but_at_its_marks() -> None:
    lines = streamed(CHINESE, 20, 3).split("\n")
    assert "".join(lines) == CHINESE
    assert all(16 <= cell_len(line) <= 20 for line in lines[:-1])
    assert not any(line[0] in "，。）" or line[-1] == "（" for line in lines)


def test_a_word_longer_than_a_line_is_left_in_one_piece() -> None:
    for seed in range(20):
        assert streamed(f"See {URL} for more.", 30, seed).split() == f"See {URL} for more.".split()
        assert URL in streamed(f"See {URL} for more.", 30, seed)


def test_what_is_shown_waits_for_one_word_at_most() -> None:
    wrap = WordWrap()
    assert wrap.take("one tw", 20) == "one "
    assert wrap.take("o", 20) == ""
    assert wrap.take(" ", 20) == "two "
    assert wrap.take("x" * 22, 20) == "x" * 22  # it cannot fit: nothing is gained by waiting
    assert wrap.take("yy" * 5, 20) == "yy" * 5
    assert wrap.take(" z", 20) == ""
    assert wrap.rest(20) == "\nz"


def test_a_line_that_is_full_to_the_edge() -> None:
    assert wrapped("12345 789 next", 9) == "12345 789\nnext"
    assert wrapped(f"123456789 {'u' * 12}", 9) == f"123456789\n{'u' * 12}"
    assert wrapped("123456789 \nnext", 9) == "123456789\nnext"


@pytest.mark.parametrize(
    "text", [ENGLISH, KOREAN, CHINESE, f"{URL} {KOREAN}", "    indented    a b c d e f g  " + "x" * 30]
)
def test_a_passage_breaks_between_words_whatever_is_marked_in_it(text: str) -> None:
    for seed in range(20):
        for columns in (4, 20, 33):
            marked = [(piece, "<{}>") for piece in pieces(text, seed)]
            lines = [line[2:] for line in render_quote(marked, columns).replace("<", "").replace(">", "").splitlines()]
            assert "".join("".join(lines).split()) == "".join(text.split())
            assert all(cell_len(line) <= columns - 2 for line in lines)
            words = {word for word in text.split() if 2 * len(word) <= columns - 2}  # a letter may take two cells
            assert words <= {word for line in lines for word in line.split()}


def test_lines_of_the_text_and_of_code_are_its_own() -> None:
    code = "```python\n    if something_long and something_else and more:\n        pass\n```"
    text = f"1. one\n\n   - two\n{code}\nand then as before, on"
    assert wrapped(text, 16) == f"1. one\n\n   - two\n{code}\nand then as \nbefore, on"
    assert wrapped(text, None) == text
