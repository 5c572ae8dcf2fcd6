"""The manual page for `man kvtool`, made from what the commands declare; `python -m kvtool.cli.reference` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvtool.cli.commands import described
from kvtool.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL, EXIT_USAGE

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "kvtool.1"
_HEAD = r"""
.\" Made by `make docs`.
.TH KVTOOL 1 "" kvtool "User Commands"
.SH NAME
kvtool \- answers over documents whose KV caches are computed once and fused at query time
.SH SYNOPSIS
.B kvtool
.I COMMAND
.RI [ OPTION ...]
.SH DESCRIPTION
A value of an option comes from, in this order: the flag, the variable that stands behind it, ./kvtool.toml and the
user's configuration file, the default.
.B kvtool help
shows pages about what the words mean, about JSON, shared stores and trouble.
.SH COMMANDS
""".lstrip()
_TAIL = rf"""
.SH EXIT STATUS
{EXIT_DONE}: done; {EXIT_FAILED}: failed; {EXIT_USAGE}: the command makes no sense as it stands; {EXIT_PARTIAL}: done in
part; others:
.BR "kvtool help troubleshooting" .
""".lstrip()


def manual(commands: Iterable[tuple[str, Any, Any]]) -> str:
    """The whole page, in the language of `man`.

    Parameters
    ----------
    commands : as they are typed, what they are, and a context of each.
    """
    lines = [_HEAD.rstrip()]
    for path, command, context in commands:
        lines += [f".SS {_plain(path)}", *_paragraphs(command.help or "")]
        usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
        lines += [".PP", ".nf", *map(_line, [f"{path} {usage}".rstrip(), *_examples(command)]), ".fi"]
        for heading, rows in described(command, context).items():
            lines += [".PP", f".B {_plain(heading)}"]
            for row in rows:
                lines += [".TP", f".B {_plain(row.record[0])}", _line(row.record[1])]
                if row.option is not None and row.option.setting:
                    lines += [f"({_plain(row.option.env)})"]
    return "\n".join([*lines, _TAIL])


def _examples(command: object) -> Iterator[str]:
    return (f"kvtool {line}" for line in getattr(command, "examples", ()))


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.replace("\b", "").strip().split("\n\n")):
        if number:
            yield ".PP"
        yield _line(paragraph)


def _plain(text: str) -> str:
    """A text in which `man` sees no signs of its own."""
    return " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")


def _line(text: str) -> str:
    """The same where it begins a line: no request may come of it."""
    return rf"\&{_plain(text)}" if text.lstrip().startswith((".", "'")) else _plain(text)
