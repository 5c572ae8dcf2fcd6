"""Options of the model, of sampling, of the instruction that every prompt begins with, and of the embedding model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.files import read_regular
from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # for a new store; an existing one remembers its own
MODEL, ANSWER = "Model", "Answer"  # headings in the commands' help
ORDINARY = 256  # tokens of an answer
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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options, sections=("query",), group=ANSWER):
    """Options of how the tokens of an answer are chosen."""

    max_tokens: int = option(ORDINARY, "Maximum tokens of the answer.", lowest=1)
    temperature: float = option(0.0, "Sampling temperature; 0 always takes the most likely token.", lowest=0, highest=2)
    seed: int = option(0, "Seed of the random numbers for sampling.", lowest=0, highest=2**63 - 1)
    stop_repeats: bool = option(
        True, "End an answer when it starts to repeat itself.", parameter="sampling.stop_repeats"
    )
    top_p: float = option(
        1.0,
        "Sample from the most likely tokens with this share of the probability.",
        parameter="sampling.top_p",
        lowest=0,
        highest=1,
    )
    sampled_tokens: int = option(
        0, "Sample from this number of the likeliest tokens; 0: all.", parameter="sampling.top_k", lowest=0
    )
    min_p: float = option(
        0.0, "Minimum share of the best token's chance.", parameter="sampling.min_p", lowest=0, highest=1
    )
    frequency_penalty: float = option(
        0.0,
        "Lower a token's logit by this for each time that the answer has it.",
        parameter="sampling.frequency_penalty",
        lowest=-2,
        highest=2,
    )
    presence_penalty: float = option(
        0.0,
        "Lower a token's logit by this once the answer has it.",
        parameter="sampling.presence_penalty",
        lowest=-2,
        highest=2,
    )
    repetition_penalty: float = option(
        1.0,
        "Divisor of the answer's own tokens.",
        parameter="sampling.repetition_penalty",
        lowest=0.01,
        highest=10,
    )
    repeat_last_n: int = option(
        -1, "Last tokens that the repetition penalty counts; -1: all.", parameter="sampling.repeat_last_n", lowest=-1
    )
    logit_bias: tuple[str, ...] = option(
        (),
        "Add a number to a token's logit.",
        flag=None,
        setting=False,
        metavar="ID=BIAS",
        pattern=r"\d{1,9}=[-+]?\d{1,9}(\.\d*)?(e[-+]?\d\d?)?",
    )
    min_tokens: int = option(0, "Minimum tokens of the answer.", parameter="sampling.min_tokens", lowest=0)
    top_logprobs: int | None = option(
        None,
        "Note the log-probability of each token, and so many alternatives.",
        flag=None,
        setting=False,
        lowest=0,
        highest=20,
    )
    grammar: str = option("", "Hold the answer to this grammar, in llguidance's Lark.", flag=None, setting=False)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        pairs = (pair.partition("=") for pair in self.logit_bias)
        return {int(token): float(bias) for token, _, bias in pairs}

    @property
    def is_greedy(self) -> bool:
        penalty = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return not (self.temperature or penalty or self.logit_bias or self.min_tokens or self.grammar)


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
