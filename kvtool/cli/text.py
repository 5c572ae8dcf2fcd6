"""Text that is safe to print, and numbers as people read them."""

from __future__ import annotations

import re

_LOOKALIKES = str.maketrans(
    {"…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x", "→": "->", "≥": ">="}
    | {"≤": "<=", "±": "+-", "─": "-", "━": "-", "│": "|", "•": "*", "√": "v", "\xa0": " "}
)
# C0 but tab and newline, DEL, C1, and the marks that reorder what follows them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Foreign text without escape sequences' ESC, control characters and direction overrides."""
    return _UNSAFE.sub("", text)


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
