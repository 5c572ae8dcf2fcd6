"""Command lines whose options take several values at once."""

from __future__ import annotations

import shlex
from typing import Any

from kvtool.cli.commands import Command
from kvtool.core.errors import UsageError


class ManyValues(Command):
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
                if option is not None and not is_flag(option):
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


class Question(ManyValues):
    """A command whose argument is one question: without quotation marks, its further words are told from others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        further = super().parse_args(ctx, args)
        if further and not ctx.resilient_parsing:
            (first,) = (ctx.params[each.name] for each in self.params if each.param_type_name == "argument")
            asked = " ".join([first, *further])
            quoted = shlex.quote(asked) if set(asked) & set('"$`\\!') else f'"{asked}"'
            raise UsageError("the question is several words", f"put it in quotation marks: {ctx.command_path} {quoted}")
        return further


def is_flag(option: Any) -> bool:
    """Whether an option of a command takes no value."""
    return bool(getattr(option, "is_flag", False) or getattr(option, "count", False))
