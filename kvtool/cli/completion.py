"""`--install-completion` and `--show-completion`: for the shell that is named, or for the one that calls.

What is installed is typer's. Its own flags see only the calling shell, and ignore a name after them; its
script for zsh does nothing at the first Tab of a shell but say what completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.completion

from kvtool.cli.out import Out
from kvtool.core.errors import UsageError, did_you_mean

VARIABLE = "_KVTOOL_COMPLETE"  # set by the shell's completion script
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
INSTALL, SHOW = "--install-completion", "--show-completion"
FLAGS = (INSTALL, SHOW)
typers: Any = typer.completion
_NAME = "kvtool"
_AT_FIRST_TAB = """
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _kvtool_completion "$@"
fi
"""


def _flag(name: str, help: str) -> Any:
    return typer.Option(name, metavar=f"[{'|'.join(SHELLS)}]", help=help, autocompletion=lambda: [*SHELLS])


Install = Annotated[str | None, _flag(INSTALL, "Install tab completion, by default for the current shell.")]
Show = Annotated[str | None, _flag(SHOW, "Print the completion script.")]


def do(flag: str, names: Sequence[str]) -> NoReturn:
    """Do what a flag of completion asks for, and leave.

    Parameters
    ----------
    names : the words after it: a shell, or nothing.

    Raises
    ------
    UsageError : that is no shell, or it cannot be seen which one calls.
    """
    if len(names) > 1:
        raise UsageError(f"{flag} takes one shell", f"one of {', '.join(SHELLS)}")
    shell = names[0] if names else _calling(flag)
    if shell not in SHELLS:
        hint = did_you_mean(shell, SHELLS) or f"there is completion for {', '.join(SHELLS)}"
        raise UsageError(f"there is no completion for the shell {shell!r}", hint)
    script = typers.get_completion_script(prog_name=_NAME, complete_var=VARIABLE, shell=shell) + "\n"
    if shell == "zsh":
        script += _AT_FIRST_TAB
    if flag == SHOW:
        Out().print(script, end="")
        raise typer.Exit
    _, path = typers.install(shell, _NAME, VARIABLE)
    if shell == "zsh":
        path.write_text(script, "utf-8")
    Out().status(f"completion for {shell} is installed in {path}; a shell that is started from now on has it")
    raise typer.Exit


def _calling(flag: str) -> str:
    import shellingham

    try:
        name: str = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        raise UsageError("it cannot be seen which shell calls", f"name it: `{_NAME} {flag} bash`") from None
    return name


def answer(root: Any, args: list[str]) -> NoReturn:
    """Print the possible words for a shell's completion script, and leave."""
    typers.completion_init()
    root.main(args, prog_name=_NAME, complete_var=VARIABLE)
    raise typer.Exit
