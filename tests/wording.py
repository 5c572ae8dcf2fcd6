"""The wording of errors: tests assert what kind of error is raised, and `wording.txt` has what it says.

`KVTOOL_TEST_WORDING=record` writes the entries of the functions that have run, with all their cases and without xdist.
An entry is of all errors of a function, of the n-th in each case (`function #n`), or in one (`function[case] #n`).
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FILE, RECORDS = Path(__file__).with_suffix(".txt"), os.environ.get("KVTOOL_TEST_WORDING") == "record"
_ENTRIES = (entry.partition("\n") for entry in re.split(r"\n(?=\S)", FILE.read_text("utf-8")))
KNOWN = {key: re.sub("(?m)^    ", "", text).rstrip() for key, _, text in _ENTRIES if key}
_NUMBER = re.compile(r"(?<!\w)(?<![a-zA-Z]-)\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_TEST = re.compile(r"tests/(.+?\.py::[\w:]+)(\[.*\])?(?:@.*)? \(\w+\)", re.DOTALL)  # @: xdist's group
_VOLATILE = {
    re.escape(sys.executable): "<python>",
    re.escape(str(Path.home())) + r"\b": "<home>",
    r"torch\.(?:b?float|u?int)\d+|(?<![^\W_])(?:0x)?[0-9a-f]{8,}(?:-[0-9a-f]{4,})*(?![^\W_])": "N",  # dtypes, digests
    r"(?m)[ \t]+$": "",
}
_counts, _recorded = dict[str, int](), dict[tuple[str, ...], str]()


@contextmanager
def refused(*types: type[BaseException], numbers: bool = False) -> Iterator[Any]:
    """Expect an error or a warning of one of `types` with the wording that is recorded, and with its `numbers`."""
    with pytest.warns(types) if issubclass(types[0], Warning) else pytest.raises(types) as caught:
        yield caught
    error = getattr(caught, "value", None) or next(each.message for each in caught if isinstance(each.message, types))
    said, test = _said(error, numbers), os.environ["PYTEST_CURRENT_TEST"]
    _counts[test] = _counts.get(test, 0) + 1
    function, case = _TEST.fullmatch(test).groups("")
    names = (function, f"{function} #{_counts[test]}", f"{function}{case} #{_counts[test]}")
    wanted = next((KNOWN[name] for name in reversed(names) if name in KNOWN), "(no entry)")
    _recorded[names] = said
    record = f"KVTOOL_TEST_WORDING=record .venv/bin/python -m pytest 'tests/{function}'"
    assert RECORDS or said == wanted, f"{names[-1]} says:\n{said}\n{FILE.name} has:\n{wanted}\nRecord it: {record}"


def _said(error: Any, numbers: bool) -> str:
    text = "\n".join(filter(None, (getattr(error, "message", None) or str(error), getattr(error, "hint", None))))
    root = re.escape(str(Path(os.environ.get("KVTOOL_HOME", "/none/none/none")).parent.parent))
    for pattern, name in ({rf"{root}/[\w-]+": "<tmp>"} | _VOLATILE).items():
        text = re.sub(pattern, name, text)
    return (text if numbers else _NUMBER.sub("N", text)).encode("utf-8", "backslashreplace").decode().rstrip()


@atexit.register
def _write() -> None:
    if not RECORDS:
        return
    first: dict[str, str] = {}
    differ = {name for names, text in _recorded.items() for name in names if first.setdefault(name, text) != text}
    entries = {key: text for key, text in KNOWN.items() if re.split(r"\[| #", key)[0] not in first}
    entries |= {next(name for name in names if name not in differ): text for names, text in _recorded.items()}
    order = sorted(entries, key=lambda key: (key.partition(" #")[0], len(key), key))
    fresh = FILE.with_suffix(".new")
    fresh.write_text("".join(re.sub("\n", "\n    ", f"{key}\n{entries[key]}") + "\n" for key in order), "utf-8")
    fresh.replace(FILE)
