"""A reader: the events of a calendar (`.vcs`, in the lines of RFC 5545), one below the other."""

from __future__ import annotations

import re

from kvtool.core.corpus.readers.document import Document, joined

_SHOWN = {"SUMMARY": "What", "DTSTART": "When", "LOCATION": "Where", "DESCRIPTION": "About"}


def read(source: str, data: bytes) -> list[Document]:
    """Make a document of a file's bytes; `source` is its path. An answer cites `work.vcs event 2`."""
    lines = re.sub(r"\r?\n[ \t]", "", data.decode("utf-8", "replace")).splitlines()  # long lines are folded
    events: list[list[str]] = []
    for line in lines:
        name, _, value = line.partition(":")
        field = name.partition(";")[0].upper()
        if line == "BEGIN:VEVENT":
            events.append([])
        elif events and field in _SHOWN:
            events[-1].append(f"{_SHOWN[field]}: {_plain(value)}")
    return [joined(source, "text", ((f"event {number}", "\n".join(event)) for number, event in enumerate(events, 1)))]


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] in "nN" else found[1], value)
