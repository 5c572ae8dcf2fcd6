"""Values that several commands read in the same way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import typer.core

from kvtool.core.common.sizes import size_in_bytes
from kvtool.core.errors import UsageError

__all__ = ["ManyValues", "duration", "list_of", "size_in_bytes", "store_path", "system_text"]


def store_path(store: str) -> Path:
    """The store's folder; the user's own when none is named.

    Raises
    ------
    UsageError : a URL, where a command needs the folder itself.
    """
    from kvtool.core.common.places import data_dir
    from kvtool.core.common.urls import is_url

    if is_url(store):
        raise UsageError(
            "this command works on a local store, not on a URL", "`kvtool store pull URL` brings it here, `push` back"
        )
    return Path(store) if store else data_dir() / "store"


def duration(text: str, flag: str) -> float:
    """`30d`, `12h`, `10m`, `2w`, `90` (seconds) → seconds.

    Raises
    ------
    UsageError : it is no length of time.
    """
    from kvtool.core.common.durations import seconds

    try:
        found = seconds(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise UsageError(f"{flag}: {text!r} is no time", "such as 30d, 12h or 10m")
    return found


def list_of(given: list[str] | None) -> list[str]:
    """The values of an option that may be repeated and may hold several with commas between them, each once."""
    words = [word.strip() for value in given or () for word in value.split(",")]
    return list(dict.fromkeys(word for word in words if word))


def system_text(path: str | None) -> str | None:
    """The instruction in a file given by `--system`.

    Raises
    ------
    UsageError : it cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the instruction {path!r} cannot be read: {error}", "--system takes a UTF-8 text file"
        ) from error
    if not text:
        raise UsageError(f"the instruction {path!r} is empty", "write what the model should do, or leave --system out")
    return text


class ManyValues(typer.core.TyperCommand):
    """A command whose repeatable options take several values at once: `--chunks A B C`.

    Where such a run of words is all that could hold the command's argument, its last word is that.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._spread(list(args)))

    def _spread(self, args: list[str]) -> list[str]:
        """The arguments with each such option repeated before every value."""
        options = {flag: option for option in self.params for flag in option.opts if flag.startswith("-")}
        out: list[str] = []
        positional, run = False, ""  # the option whose values are being read
        last = 0  # where the last value after an option's first one stands in `out`
        at = 0
        while at < len(args):
            word, option = args[at], options.get(args[at])
            at += 1
            if word == "--":
                return [*out, word, *args[at:]]
            if word.startswith("-") and word != "-":
                out.append(word)
                run = ""
                if option is not None and not _is_flag(option):
                    out += args[at : at + 1]
                    at += 1
                    run = word if option.multiple else ""
            elif run:
                out += [run, word]
                last = len(out) - 1
            else:
                out.append(word)
                positional = True
        takes_one = any(option.param_type_name == "argument" for option in self.params)
        return out if positional or not last or not takes_one else [*out[: last - 1], *out[last + 1 :], out[last]]


def _is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False) or getattr(option, "count", False))
