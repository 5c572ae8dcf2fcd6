"""Options of the model, of the instruction that every prompt begins with, and of the embedding model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.files import read_regular
from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # for a new store; an existing one remembers its own
MODEL = "Model"  # the heading of these options
# The instruction of a new store; an existing one remembers its own. samples/results/quality.md compares wordings.
DEFAULT_SYSTEM = (
    "You are a helpful assistant. Answer from the passages in full sentences. "
    "If the passages do not contain the answer, say so."
)
_FILE_NAME = re.compile(r"[!-~]*([/\\][!-~]*|\.[A-Za-z]\w{0,4})")  # no sentence: `say.txt`, `prompts/brief`
_MOST_BYTES = 1 << 16  # of a file with an instruction


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options):
    offline: bool = option(False, "Never use the network.", group=MODEL)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(NetworkOptions):
    model: str | None = option(
        None,
        "The language model; smollm2 is small, for trials.",
        group=MODEL,
        metavar="NAME|FOLDER|FILE.gguf|smollm2",
        instead=f"the store's own, else {DEFAULT_MODEL}",
    )
    device: str = option(
        "auto",
        "The device that computes.",
        group=MODEL,
        metavar="auto|cpu|cuda[:N]|mps",
        suggest=("auto", "cpu", "cuda", "mps"),
        pattern=r"auto|cpu|mps|cuda(:\d+)?",
    )
    dtype: str = option(
        "auto",
        "The number format to compute in; int8: products with a GGUF file's weights, on a CPU.",
        group=MODEL,
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )


def system_option(group: str, *, instead: str = "the store's own") -> str | None:
    """Declare the instruction: in Python its text; elsewhere its text, or `@` and a file that holds it."""
    return option(
        None,
        "The system prompt: the instruction before the passages.",
        group=group,
        metavar="TEXT|@FILE",
        unit="text",
        check=lambda text: "" if text.strip() else "is empty",
        read=system_text,
        instead=instead,
    )


def system_text(given: str) -> str:
    if given.startswith("@"):
        if not given[1:].strip():
            raise UsageError("--system: @ names no file", "--system @FILE reads a file")
        return _file_text(Path(given[1:]).expanduser())
    if _names_file(given):
        raise UsageError(
            f"--system: {given!r} is a file's name, and no instruction", f"--system @{given} reads the file"
        )
    return given.strip()


def _names_file(text: str) -> bool:
    try:
        return _FILE_NAME.fullmatch(text) is not None or Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # longer than a name may be
        return False


def _file_text(path: Path) -> str:
    hint = "--system @FILE takes a UTF-8 text file"
    try:
        data = read_regular(path, _MOST_BYTES + 1)
        text = data.decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the instruction {str(path)!r} cannot be read: {error}", hint) from error
    if not text or len(data) > _MOST_BYTES:
        raise UsageError(f"the instruction {str(path)!r} {'is over 64 KiB' if text else 'is empty'}", hint)
    return text


def embedder_option(group: str) -> str | None:
    return option(
        None,
        "The embedding model for search by meaning.",
        group=group,
        metavar="NAME|FOLDER",
        instead="the store's own, else none",
    )
