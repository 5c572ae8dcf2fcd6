"""Output on stdout and stderr, on any terminal and on none."""

from __future__ import annotations

import errno
import io
import json
import re
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from kvtool.cli import progress as module
from kvtool.cli.out import JobView, Out, OutputClosed, to_json
from kvtool.cli.terminal import clean, degrade
from kvtool.core.common.sizes import counted, shown_size
from kvtool.core.errors import DamagedError, KvtoolError


class Terminal(io.TextIOWrapper):
    """A stream with an encoding, that says whether it is a terminal."""

    def __init__(self, encoding: str = "utf-8", tty: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


Make = Callable[..., tuple[Out, Terminal, Terminal]]


@pytest.fixture
def make() -> Make:
    def build(mode: Any = "human", verbosity: int = 0, encoding: str = "utf-8", tty: bool = False) -> Any:
        stdout, stderr = Terminal(encoding, tty), Terminal(encoding, tty)
        return Out(mode, verbosity, stdout, stderr), stdout, stderr

    return build


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


def test_result_in_every_mode(make: Make) -> None:
    for mode, expected in (("human", "drawn\n"), ("json", '{"schema": 1, "n": 1}\n')):
        out, stdout, _ = make(mode)
        out.result({"n": 1}, human=lambda out=out: out.print("drawn"))  # type: ignore[misc]
        assert stdout.text == expected


def test_json_takes_what_commands_have() -> None:
    import numpy as np

    @dataclass
    class Timing:
        ttft: float

    nan, many = float("nan"), np.arange(2)
    value = {"path": Path("a"), "nan": nan, "t": (Timing(1.5),), "n": np.float32(2), "a": many, 3: None}
    expected = {"path": "a", "nan": None, "t": [{"ttft": 1.5}], "n": 2, "a": [0, 1], "3": None}
    assert json.loads(to_json(value)) == expected
    with pytest.raises(TypeError, match="object"):
        to_json(object())


def test_json_stays_exact_on_a_narrow_encoding() -> None:
    value = {"text": "한국어 \ud800"}
    assert json.loads(to_json(value, encoding="ascii")) == value
    assert json.loads(to_json(value)) == value
    assert to_json({"text": "é"}) == '{"text": "é"}'


def test_json_cannot_steer_the_terminal_that_shows_it(make: Make) -> None:
    """What a person's output leaves out is there, as an escape that every parser undoes."""
    steering = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F)]
    steering += [*range(0x2066, 0x206A), 0xFEFF, 0xD800, 0xDFFF]
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


def test_json_escapes_what_lies_beyond_16_bits() -> None:
    text = to_json({"text": "a\U000e0041\U0001d173\u2028b"})
    assert text == '{"text": "a\\udb40\\udc41\\ud834\\udd73\\u2028b"}'
    assert json.loads(text) == {"text": "a\U000e0041\U0001d173\u2028b"}


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
    with pytest.raises(KvtoolError, match="standard output: No space left") as error:
        out.json({})
    assert error.value.exit_code == 1
    out.error(error.value)


def test_missing_streams_are_silent() -> None:
    out = Out()
    out._stdout.stream = out._stderr.stream = None
    speak(out)
    with out.progress("x") as bar:
        bar.advance()


def test_a_broken_stderr_is_ignored() -> None:
    Out(stderr=Broken(errno.EPIPE)).warning("x")


@pytest.mark.parametrize(
    ("term", "no_color", "coloured"), [("xterm", "", True), ("dumb", "", False), ("xterm", "1", False)]
)
def test_colour(term: str, no_color: str, coloured: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    out, _, stderr = make(tty=True)
    out.warning("x")
    assert ("\x1b" in stderr.text) == coloured


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_bar_on_a_terminal(encoding: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, stdout, stderr = make(encoding=encoding, tty=True)
    with out.progress("prefill [x]", total=100) as bar:
        bar.advance(60)
        bar.expect(90)
        bar.describe("문서\n이름")
        out.warning("odd [red]name[/red]")
    assert "60/90 tokens, " in stderr.text
    assert "tokens/s" in stderr.text
    assert "odd [red]name[/red]" in stderr.text
    assert stdout.text == ""
    assert out._bars is None


def test_a_result_does_not_stand_behind_a_bar(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, stdout, stderr = make(tty=True)
    with out.progress("questions", total=2) as bar:
        bar.advance(1)
        out.json({"answer": "x" * 200})
    said = stdout.text + stderr.text
    line = next(line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).splitlines() if "answer" in line)
    assert json.loads(line.split("\r")[-1])["answer"] == "x" * 200


@pytest.mark.parametrize(
    ("speed", "shown"),
    [
        *((None, ""), (0.0, ""), (0.034, "0.03 tokens/s"), (0.4, "0.4 tokens/s")),
        *((12.3, "12 tokens/s"), (1234.5, "1,234 tokens/s")),
    ],
)
def test_a_slow_bar_does_not_seem_to_stand(speed: float | None, shown: str) -> None:
    assert module.speed_text(speed, "tokens") == shown


@pytest.mark.parametrize(("mode", "verbosity", "tty"), [("human", 0, False), ("human", -1, True), ("json", 0, False)])
def test_no_bar_where_nobody_watches(mode: str, verbosity: int, tty: bool, make: Make) -> None:
    out, stdout, stderr = make(mode, verbosity, tty=tty)
    with out.progress("prefill", total=2) as bar:
        bar.advance(2)
    assert stdout.text == stderr.text == ""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_a_line_now_and_then_at_v(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out, _, stderr = make(verbosity=1)
    with out.progress("prefill", total=400) as bar:
        for clock.now in (5.0, 10.0, 11.0, 25.0):
            bar.advance(100)
    assert stderr.text == ("prefill: 200/400 tokens, 20 tokens/s, 0:00:10 left\nprefill: 400/400 tokens, 16 tokens/s\n")


def test_the_time_left_runs_down_between_steps_that_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = module.Pace(4000, "tokens")
    assert (pace.speed, pace.left, pace.text()) == (None, None, "0/4,000 tokens")
    left = []
    for step in range(1, 8):
        clock.now = 100.0 * step
        pace.advance(500)
        assert pace.speed == pytest.approx(5)
        for clock.now in (100.0 * step, 100.0 * step + 50):
            left.append(pace.left)
    assert left == pytest.approx([800 - 50.0 * step for step in range(2, 16)])
    pace.total = 3500
    assert pace.left == 0
    assert pace.text() == "3,500/3,500 tokens, 5.0 tokens/s"


def test_no_time_is_foretold_by_the_first_steps_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is slow, as the model has to warm up: it would say two hours."""
    clock = Clock(monkeypatch)
    pace = module.Pace(40_000, "tokens")
    said = []
    for clock.now in (20.0, 21.0, 22.0):
        pace.advance(100)
        said.append((pace.left is None, "left" in pace.text()))
    assert said == [(True, False), (True, False), (False, True)]
    few = module.Pace(1000, "tokens")
    clock.now = 30.0
    few.advance(100)
    assert few.left is not None  # a tenth of the work


def test_what_still_works_has_not_0_seconds_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = module.Pace(1000, "tokens")
    clock.now = 9.0
    pace.advance(900)
    assert pace.text() == "900/1,000 tokens, 100 tokens/s, 0:00:01 left"
    clock.now = 15.0
    assert pace.text() == "900/1,000 tokens, 100 tokens/s, finishing"


def test_the_speed_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = module.Pace(None, "tokens")
    for step in range(1, 601):
        clock.now = float(step)
        pace.advance(1000 if step <= 300 else 10)
    assert pace.speed == pytest.approx(10)
    for _ in range(100_000):
        pace.advance(0)  # a step that takes no time keeps none
    assert len(pace._steps) < 100


@pytest.fixture
def ticking(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Out, Callable[[float], list[str]]]]:
    """An output to a pipe, and what it says in so many seconds of a clock that only the test moves."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module.Ticker, "_run", lambda self: None)
    out, _, stderr = make()

    def pass_time(seconds: float) -> list[str]:
        before = len(stderr.text.splitlines())
        for _ in range(round(seconds)):
            clock.now += 1
            (ticker,) = module._running
            ticker.tick()  # type: ignore[union-attr]
        return stderr.text.splitlines()[before:]

    with out.spinning("starting"):
        yield out, pass_time


Ticking = tuple[Out, Callable[[float], list[str]]]


def test_what_takes_long_says_so_in_a_pipe(ticking: Ticking) -> None:
    out, pass_time = ticking
    assert pass_time(4) == []
    assert pass_time(1) == ["working"]
    out.doing("loading the model")
    assert pass_time(4) == []
    assert pass_time(1) == ["loading the model"]
    assert pass_time(29) == []
    assert pass_time(31) == ["loading the model, for 0:00:35", "loading the model, for 0:01:05"]
    out.idle()
    assert pass_time(300) == []
    out.doing("answering")
    assert pass_time(4) == []
    out.print("It", end="")  # an answer shows by itself that something is done
    assert pass_time(300) == []


def test_many_short_activities_say_a_line_every_half_minute(ticking: Ticking) -> None:
    out, pass_time = ticking
    said = []
    for number in range(30):
        out.doing(f"reading file {number}")
        said += pass_time(3)
    assert len(said) == 3
    assert re.match(r"reading file \d+$", said[0])


def test_results_that_come_between_do_not_silence_a_batch(ticking: Ticking) -> None:
    out, pass_time = ticking
    with out.progress("questions", total=20, unit="questions") as bar:
        said = []
        for _ in range(20):
            out.doing("answering")
            said += pass_time(3)
            out.print("an answer")
            bar.advance()
    assert len(said) == 2
    assert said[0].startswith("questions: 9/20 questions")


def test_a_job_says_its_pace_in_a_pipe(ticking: Ticking) -> None:
    out, pass_time = ticking
    with JobView(out) as view:
        view.events.step("computing KV", 500, "tokens")
        view.events.status("loading the model")
        assert pass_time(5) == ["loading the model, for 0:00:05"]
        view.events.advance(100)
        assert [line.split(", ")[0] for line in pass_time(5)] == ["computing KV: 100/500 tokens"]
        said = []
        for _ in range(10):
            view.events.advance(10)
            said += pass_time(6)
        assert [line.split(", ")[0] for line in said] == [f"computing KV: {n}/500 tokens" for n in (150, 200)]
    assert pass_time(5) == ["working"]


def test_lines_of_what_takes_long_are_for_people_in_a_pipe(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = (("human", 0, False), ("json", 0, False))
    hidden = (("human", -1, False), ("human", 0, True), ("jsonl", 0, False), ("human", 1, False))
    for mode, verbosity, tty in (*shown, *hidden):
        out, _, _ = make(mode, verbosity, tty=tty)
        with out.spinning("starting"):
            says = any(isinstance(one, module.Ticker) for one in module._running)
        assert says == ((mode, verbosity, tty) in shown)
    for args, verbosity in ((["x", "-v"], 1), (["x", "-vv"], 1), (["-q"], -1), (["x", "--", "-v"], 0)):
        assert Out.asked(args).verbosity == verbosity


def test_the_thread_of_a_pipe_says_a_line(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_AFTER_S", 0.0)
    out, _, stderr = make()
    with out.spinning("starting"):
        while "working" not in stderr.text:
            time.sleep(0.001)


def test_phases_are_events_in_jsonl_and_words_beside_the_bar(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def run(out: Out) -> None:
        with JobView(out) as view:
            view.events.step("computing KV", 4, "tokens")
            view.events.advance(4)
            view.events.status("trying the model")

    out, stdout, _ = make("jsonl")
    run(out)
    assert "trying the model" in [json.loads(line)["message"] for line in stdout.text.splitlines()]
    out, _, stderr = make(tty=True)
    run(out)
    assert "trying the model" in stderr.text


def test_status_events_in_jsonl(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out, stdout, _ = make("jsonl")
    with out.progress("prefill", total=10, unit="chunks") as bar:
        clock.now = 2.0
        bar.advance(4)
    event = json.loads(stdout.text)
    assert (event["type"], event["done"], event["per_second"], event["unit"]) == ("status", 4, 2, "chunks")
    assert event["seconds_left"] == 3
