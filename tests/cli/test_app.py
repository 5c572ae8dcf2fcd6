"""The entry: what is imported, what is said, and the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Any

import pytest
import typer

import kvtool
from kvtool.cli.app import COMMANDS, SHOWN, main
from kvtool.cli.options import Run, takes
from kvtool.core.errors import EXIT_PARTIAL, GateError, StoreLockedError
from kvtool.core.query.options import QueryOptions

Capture = pytest.CaptureFixture[str]


def run(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **kwargs.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "kvtool", *args], env=environ, capture_output=True, text=True, encoding="utf-8", **kwargs
    )


def install(monkeypatch: pytest.MonkeyPatch, function: Any, name: str = "probe") -> None:
    made: Any = types.ModuleType(f"kvtool.cli.{name}")
    setattr(made, name, function)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(COMMANDS, name, "A probe.")


def raising(error: BaseException) -> Any:
    @takes()
    def probe(run: Run) -> None:
        raise error

    return probe


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["config", "show"], ["config", "--help"], ["help", "concepts"]]
)
def test_no_torch_and_no_other_command(args: list[str]) -> None:
    code = (
        "import sys; from kvtool.cli.app import main, COMMANDS; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'lmdb'} & set(sys.modules); assert not heavy, heavy;"
        "assert sys.argv[1:] != ['--help'] or 'rich' not in sys.modules;"
        "loaded = [c for c in COMMANDS if 'kvtool.cli.' + c in sys.modules and c not in sys.argv];"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True)


def test_the_public_names() -> None:
    assert kvtool.__all__ == dir(kvtool)
    names = {"Cache", "KvtoolError", "KvtoolWarning", "QueryOptions", "Reply", "__version__", "open"}
    assert names <= {*kvtool.__all__}
    assert all(hasattr(kvtool, name) for name in kvtool.__all__)
    with pytest.raises(AttributeError):
        _ = kvtool.nope  # type: ignore[attr-defined]


def test_help_lists_every_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for rows in SHOWN.values():
        for name, line in rows.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE)
    assert {*COMMANDS} == {name.partition(" ")[0] for rows in SHOWN.values() for name in rows}


def test_the_help_of_a_group_cuts_no_line_off(capsys: Capture) -> None:
    assert main(["store", "--help"]) == 0
    about, listed = capsys.readouterr().out.split("Commands:\n")
    assert "\n  " in about.partition("Options:")[0]
    assert "..." not in listed


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtool {kvtool.__version__}\n"


def test_no_command_shows_the_help_and_fails(capsys: Capture) -> None:
    assert main([]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "ingest" in seen.err


def test_an_argument_and_settings_reach_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    @takes(QueryOptions)
    def probe(run: Run, question: str, tag: Annotated[list[str] | None, typer.Option()] = None) -> int:
        given = run.get(QueryOptions)
        run.out.json({"q": question, "tag": tag, "k": given.top_k, "level": given.level})
        return EXIT_PARTIAL

    install(monkeypatch, probe)
    monkeypatch.setenv("KVTOOL_LEVEL", "2")
    assert main(["probe", "왜?", "--top-k", "3", "--tag", "a", "--tag", "b", "--quiet"]) == EXIT_PARTIAL
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "q": "왜?", "tag": ["a", "b"], "k": 3, "level": "2"}


def test_a_synonym_is_not_shown(capsys: Capture) -> None:
    assert main(["ingest", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "--max-chunk-tokens" in shown
    assert "--max-tokens" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(("kvtool in", "inspect"), ("kvtool config s", "show")),
        *(("kvtool config show --de", "--device"), ("kvtool config show --dtype b", "bfloat16")),
    ],
)
def test_completion(shell: str, words: str, expected: str) -> None:
    environ = {
        "_KVTOOL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": words.split()[-1],
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = run(env=environ)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "float32" not in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GateError("too far off", "--force"), 12, "error: too far off\nhint: --force\n"),
        (StoreLockedError("locked"), 11, "error: locked\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\nhint: what was committed stays"),
        (MemoryError(), 1, "error: out of memory\nhint: use fewer"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 1, "error: out of memory\nhint: use fewer"),
        (OSError(28, "No space left on device", "/s"), 14, "error: no space left: /s\nhint: free some space where"),
        (PermissionError(13, "Permission denied", "/s"), 1, "error: permission denied: /s\n"),
        (ConnectionResetError("peer"), 1, "error: unexpected ConnectionResetError: peer\n"),
        (ZeroDivisionError("by zero"), 1, "error: unexpected ZeroDivisionError: by zero\nhint: this is a bug"),
        (AssertionError(), 1, "error: unexpected AssertionError\n"),
        (typer.Exit(3), 3, ""),
        (typer.Abort(), 130, "error: interrupted"),
        (SystemExit(7), 7, ""),
        (SystemExit("words"), 1, "error: words\n"),
        (SystemExit(), 0, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_is_raised_becomes_words_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    install(monkeypatch, raising(error))
    assert main(["probe"]) == code
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(said)
    assert "Traceback" not in seen.err
    assert bool(seen.err) == bool(said)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    install(monkeypatch, raising(ZeroDivisionError("by zero")))
    monkeypatch.setenv("KVTOOL_DEBUG", "1")
    assert main(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *("nope", "--nope", "config shwo", "config show --nope", "config show extra", "config show --lock-wait -1"),
        *("config show --lock-wait", "config show --device gpu", "config show --json --jsonl", "config show -q -v"),
        "config show --config /nope.toml",
    ],
)
def test_wrong_usage(words: str, capsys: Capture) -> None:
    assert main(words.split()) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("error: ")
    assert "\nhint: " in seen.err


@pytest.mark.parametrize(
    ("word", "command"),
    [
        *(("rm", "store rm"), ("ls", "store ls"), ("audit", "inspect audit")),
        *(("list", "store ls"), ("add", "ingest"), ("ask", "query"), ("delete", "store rm")),
        *(("models", "help models"), ("version", "--version")),
    ],
)
def test_another_name_of_a_command_is_told_with_its_own(word: str, command: str, capsys: Capture) -> None:
    assert main([word]) == 2
    assert f"hint: it is `kvtool {command}`" in capsys.readouterr().err
    assert main([*command.split()[:1], "--help"]) == 0


def test_cron_has_no_home_and_no_locale(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", "config", "show"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(kvtool.__file__).parents[1])},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("redirect", "code", "said"),
    [
        ("config show | true", 0, ""),
        ("config show > /dev/full", 1, "error: cannot write to standard output: No space left on device"),
        ("config show >&-", 0, ""),
        ("config show 2>&-", 0, ""),
        ("store ls --store nowhere --json > /dev/full", 10, "error: there is no store"),
    ],
)
def test_streams_that_are_closed_or_full(redirect: str, code: int, said: str) -> None:
    if "full" in redirect and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    line = f"set -o pipefail; '{sys.executable}' -m kvtool {redirect}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


SLEEPER = """
import sys, time, types, kvtool.cli.app as app
from kvtool.cli.options import takes, Run
made = sys.modules["kvtool.cli.probe"] = types.ModuleType("kvtool.cli.probe")
app.COMMANDS["probe"] = "sleeps"
@takes()
def probe(run: Run) -> None:
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
        if "stubborn" in sys.argv: time.sleep(60)
        if "library" in sys.argv: sys.exit(1)
made.probe = probe
sys.exit(app.main(["probe"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_clean_up_and_a_second_one_kills(number: signal.Signals, code: int) -> None:
    for stubborn in ([], ["stubborn"]):
        with subprocess.Popen(
            [sys.executable, "-c", SLEEPER, *stubborn], stdout=PIPE, stderr=PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == "cleaned up\n"
            if stubborn:
                time.sleep(0.05)
                process.send_signal(number)
            assert process.wait(10) == (-number if stubborn else code)
            assert stubborn or process.stderr.read().startswith("error: ")


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_library_that_ends_by_sigterm_itself_is_terminated() -> None:
    """Ray, where it waits, ends with 1 whatever a handler raises."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER, "library"], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert err.startswith("error: terminated\n")


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    main(["--version"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_config_show_says_where_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTOOL_DTYPE", "float32")
    Path("kvtool.toml").write_text("top_k = 7")
    assert main(["config", "show", "--json", "--offline"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    assert shown["top_k"] == {"value": 7, "origin": "project", "location": "kvtool.toml"}
    assert shown["dtype"] == {"value": "float32", "origin": "environment", "location": "KVTOOL_DTYPE"}
    assert shown["offline"] == {"value": True, "origin": "flag", "location": "--offline"}
    assert shown["ratio"] == {"value": 0.15, "origin": "default", "location": ""}
    assert main(["config", "show"]) == 0
    assert "project kvtool.toml" in capsys.readouterr().out


def test_an_interruption_before_the_command_line_is_read() -> None:
    """Ctrl-C while Python still reads kvtool's own files."""
    code = """
import sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == "kvtool.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from kvtool.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
