"""Arguments, output and errors of the measuring scripts."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn, TypeVar

from kvtool.cli.out import Out
from kvtool.core.errors import EXIT_INTERRUPTED, KvtoolError, UsageError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of `kvtool`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "--help shows what is possible")


def parser(about: str | None) -> Parser:
    """Return a parser that shows a module's docstring, with `--json`."""
    made = Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return made


def whole(text: str) -> int:
    """Read a whole number above 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def positive(text: str) -> float:
    """Read a finite number above 0."""
    if not (math.isfinite(number := float(text)) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def several(read: Callable[[str], T], choices: Collection[str] = ()) -> Callable[[str], tuple[T, ...]]:
    """Return a reader of values between commas, each of `choices` where there are any."""

    def listed(text: str) -> tuple[T, ...]:
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if choices and word not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(choices)}")
        return tuple(dict.fromkeys(map(read, words)))

    return listed


def run(arguments: Parser, given: Sequence[str] | None, work: Callable[..., None]) -> int:
    """Call `work` with the parsed arguments and an `Out`; return the exit code of a `kvtool` command."""
    out = Out.asked(sys.argv[1:] if given is None else given)
    try:
        work(arguments.parse_args(given), out)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except KvtoolError as error:
        out.error(error)
        return error.exit_code
    return 0
