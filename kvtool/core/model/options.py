"""What can be set of the model, and of the instruction that every prompt begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # for a new store; an existing one remembers its own
MODEL = "Model"  # the heading that these options stand under


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options):
    """Whether the network may be used."""

    offline: bool = option(False, "Never touch the network.", group=MODEL)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(NetworkOptions):
    """Which model is loaded, and how. Without a name it is the one that the store was built with."""

    model: str | None = option(
        None, "The language model.", group=MODEL, metavar="NAME|FOLDER|FILE.gguf|smollm2", instead="the store's own"
    )
    device: str = option(
        "auto",
        "Where to compute.",
        group=MODEL,
        metavar="auto|cpu|cuda[:N]|mps",
        suggest=("auto", "cpu", "cuda", "mps"),
        pattern=r"auto|cpu|mps|cuda(:\d+)?",
    )
    dtype: str = option(
        "auto", "Number format to compute in.", group=MODEL, choices=("auto", "float32", "bfloat16", "float16")
    )


def system_option(group: str) -> str | None:
    """The instruction, an option of whatever makes prompts: in Python its text, elsewhere a file that holds it."""
    return option(
        None,
        "A file with the instruction that the prompt begins with.",
        group=group,
        metavar="FILE",
        unit="path",
        read=system_text,
        instead="the store's own",
    )


def system_text(path: str) -> str:
    """The instruction in a file.

    Raises
    ------
    UsageError : it cannot be read, or is empty.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the instruction {path!r} cannot be read: {error}", "--system takes a UTF-8 text file"
        ) from error
    if not text:
        raise UsageError(f"the instruction {path!r} is empty", "write what the model should do, or leave --system out")
    return text
