"""Options that choose files and their readers: a part of the files, commands by file ending, an encoding of texts.
Imports no reader."""

from __future__ import annotations

import codecs
import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.errors import UsageError

PATH = "{}"  # what stands for the file in a command
# Python's text encodings that are no file's: some of them take quadratic time.
_NO_CHARSETS = frozenset(("punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined", "mbcs", "oem"))
_FORM = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


def commands_of(written: Sequence[str]) -> dict[str, str]:
    """Parse commands by file ending, of `ending=command`. Raises UsageError for an ending that is given twice."""
    commands: dict[str, str] = {}
    for each in written:
        ending, _, command = each.partition("=")
        key = "." + ending.strip().lower().removeprefix(".")
        if key in commands:
            raise UsageError(f"two commands read {key} files", "keep one of them")
        commands[key] = command.strip()
    return commands


def command_error(written: str) -> str:
    """Return the error in `ending=command`; empty if it is valid."""
    ending, sign, command = written.partition("=")
    if not sign or not ending.strip(". ") or set(ending) & set("/\\*? "):
        return "is no `ending=command`, such as `djvu=djvutxt {}`"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"is no command: {error}".lower()
    return "" if any(PATH in word for word in words[1:]) else f"has no {PATH}, which stands for the file"


def is_charset(name: str) -> bool:
    try:
        return codecs.lookup(name).name.replace("-", "_") not in _NO_CHARSETS and bool("a".encode(name))
    except (LookupError, ValueError):
        return False


def encoding_error(name: str) -> str:
    return "" if is_charset(name) else "is not a known encoding, such as cp1251, latin-1 or shift_jis"


def shard_error(value: str) -> str:
    found = _FORM.fullmatch(value)
    return "" if found and int(found[1]) <= int(found[2]) else "is no part: I/N with 1 <= I <= N, such as 2/8"


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the files, by a digest of their paths: files keep their part when others are added or removed."""

    index: int
    parts: int

    @classmethod
    def read(cls, value: str) -> Shard:
        index, _, parts = value.partition("/")
        return cls(int(index) - 1, int(parts))

    def holds(self, path: str) -> bool:
        digest = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.parts == self.index
