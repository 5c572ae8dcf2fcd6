"""Finding 17: hints name commands that exist, and a store's file shrinks when exact records are dropped."""

from __future__ import annotations

import re
from pathlib import Path

import kvtool as package
from kvtool.cli.app import COMMANDS, load_command
from tests.cli.working import damages
from tests.compress.making import run
from tests.upkeep.watching import bytes_in

_NAMED = re.compile(r"`kvtool ((?:[a-z]+[a-z-]* ?)+)")


def test_every_command_that_a_message_names_exists() -> None:
    known: set[tuple[str, ...]] = set()
    for name in COMMANDS:
        command = load_command(name)
        known.add((name,))
        known |= {(name, inner) for inner in getattr(command, "commands", {})}
    groups = {words[0] for words in known if len(words) == 2}
    named = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for found in _NAMED.finditer(path.read_text(encoding="utf-8")):
            words = found[1].split()
            named.add(tuple(words[: 2 if words[0] in groups and len(words) > 1 else 1]))
    assert ("store", "prune") in named
    assert named <= known, sorted(named - known)


def test_the_file_shrinks_when_exact_records_are_dropped(fitted: Path) -> None:
    before = bytes_in(fitted)
    report = run(fitted, "2", keep_raw=False)
    assert report.dropped
    assert report.to_json()["bytes_freed"] > 0
    assert bytes_in(fitted) < before - report.freed // 2
    assert damages(fitted) == []
