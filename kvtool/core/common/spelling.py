"""Names that are the same to who reads them: Unicode writes 가 and é as one character or as several."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path


def composed(name: str) -> str:
    """A name with its letters composed (NFC): equal for names that look alike."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def as_on_disk(given: Path) -> Path:
    """A path as its names are spelled on the disk, where nothing is at it as it was typed.

    A keyboard composes letters that a file's name may have taken apart, as Macs store Korean and accents, or the other
    way round; on most file systems these are two names. Where both spellings are there, or none, nothing is changed.
    """
    try:
        if str(given).isascii() or os.path.lexists(given):
            return given
    except ValueError:  # no path at all, which is told where it is read
        return given
    found = Path(given.anchor)
    for name in given.parts[1:] if given.anchor else given.parts:
        found /= name if os.path.lexists(found / name) else _spelled(found, name)
    return found if os.path.lexists(found) else given


def _spelled(folder: Path, name: str) -> str:
    """The one entry of a folder that has this name, its letters composed otherwise."""
    wanted = composed(name)
    try:
        alike = [entry for entry in os.listdir(folder) if composed(entry) == wanted]
    except OSError:
        return name
    return alike[0] if len(alike) == 1 else name
