"""Text that is safe to print, and numbers as people read them."""

from __future__ import annotations

import re

from kvtool.core.common.json_text import UNSEEN

_LOOKALIKES = str.maketrans(
    {"…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x", "→": "->", "≥": ">="}
    | {"≤": "<=", "±": "+-", "─": "-", "━": "-", "│": "|", "•": "*", "√": "v", "\xa0": " "}
)
# C0 but tab and newline, DEL, C1, and what has no shape, marks of direction among it.
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{UNSEEN}]")
_BREAKS = str.maketrans("\u2028\u2029", "  ")
# Joiners and selectors of variants belong to the letter or emoji before them, one or two of them. Latin letters have
# none, and in a run any data may be hidden. A text may begin with one: it may be an answer's next piece.
_JOINERS, _VARIANTS = "\u200c\u200d", "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_LOOSE = re.compile(f"(?<=[\x00-\x7f{_JOINERS}])[{_JOINERS}]|(?<=[{_JOINERS}{_VARIANTS}])[{_VARIANTS}]")


def clean(text: str) -> str:
    """Remove what steers a terminal, or cannot be seen, from foreign text: escape sequences' ESC, control characters,
    marks of direction and all other format characters.

    Arabic and Hebrew stay as they are, and so do the joiners that Persian, Indian scripts and emoji need. Flags of
    regions lose their tags, and become plain flags.
    """
    return text if text.isascii() and text.isprintable() else _LOOSE.sub("", _UNSAFE.sub("", text.translate(_BREAKS)))


def one_line(text: str) -> str:
    """`clean`, with every run of white space as one blank: a table's cell, a file name in a sentence."""
    return clean(" ".join(text.split()))


def degrade(text: str, encoding: str) -> str:
    """The text with what `encoding` cannot show put as look-alikes, else as `?`."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_LOOKALIKES).encode(encoding, errors="replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", errors="replace").decode("ascii")
