"""A reader: the events of a calendar (`.ics`, RFC 5545), each a document of its own."""

from __future__ import annotations

import re

from kvtool.core.corpus.readers import Document, EmptyFile

_SHOWN = {"SUMMARY": "What", "DTSTART": "When", "LOCATION": "Where", "DESCRIPTION": "About"}


def read(source: str, data: bytes) -> list[Document]:
    """Make documents of a file's bytes; `source` is its path."""
    lines = re.sub(r"\r?\n[ \t]", "", data.decode("utf-8", "replace")).splitlines()  # long lines are folded
    events: list[list[str]] = []
    for line in lines:
        name, _, value = line.partition(":")
        field = name.partition(";")[0].upper()
        if line == "BEGIN:VEVENT":
            events.append([])
        elif events and field in _SHOWN:
            events[-1].append(f"{_SHOWN[field]}: {_plain(value)}")
    if not any(events):
        raise EmptyFile("no event in it")
    return [Document(f"{source}#{number}", "\n".join(event), "text") for number, event in enumerate(events, 1) if event]


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] in "nN" else found[1], value)
