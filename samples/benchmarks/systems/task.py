"""Task of one measuring process, and its result: both cross a pipe as JSON. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from kvtool.core.common.types import Ids

LLAMA, TRANSFORMERS, KVTOOL = "llama.cpp", "transformers", "kvtool"
PEERS = (LLAMA, TRANSFORMERS)
AUTO, ON, OFF = "auto", "on", "off"  # llama.cpp's flash attention
DEFAULT_UBATCH = 512  # rows that llama.cpp computes at once by default
LLAMA_DEFAULT = f"{LLAMA}, defaults"


@dataclass(frozen=True, slots=True)
class Contender:
    """A system that answers a prompt.

    Attributes
    ----------
    kind : one of the three above.
    mode : kvtool's fusion mode.
    ubatch, flash : llama.cpp's settings `n_ubatch` and flash attention.
    """

    kind: str
    mode: str = ""
    ubatch: int = DEFAULT_UBATCH
    flash: str = AUTO

    @property
    def name(self) -> str:
        """Return its name in tables; the same for the same settings."""
        if self.kind == KVTOOL:
            return f"{KVTOOL} {self.mode}"
        if self.kind == TRANSFORMERS:
            return TRANSFORMERS
        default = (self.ubatch, self.flash) == (DEFAULT_UBATCH, AUTO)
        return LLAMA_DEFAULT if default else f"{LLAMA}, -ub {self.ubatch} -fa {self.flash}"


@dataclass(frozen=True, slots=True)
class Task:
    """One contender, one prompt, once.

    Attributes
    ----------
    folder : what `prepare` has made.
    threads : of all arithmetic.
    new_tokens : decoded after the first one.
    model, dtype, offline : as kvtool's options name them; `gguf` is the same model's file, where it is one.
    ratio, link_tokens, link : of kvtool's modes.
    """

    contender: Contender
    folder: str
    context: int
    threads: int
    new_tokens: int
    model: str
    dtype: str
    offline: bool
    gguf: str | None
    ratio: float
    link_tokens: int
    link: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        return cls(**{**value, "contender": Contender(**value["contender"])})


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a prompt as the store has it; `chunk_id` in hex."""

    chunk_id: str
    ids: Ids
    level: str


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt: its stored pieces, the prompt's own beginning first, and the question after them."""

    pieces: tuple[Piece, ...]
    question: Ids

    @property
    def documents(self) -> Ids:
        """All token ids before the question."""
        return tuple(token for piece in self.pieces for token in piece.ids)

    @property
    def ids(self) -> Ids:
        """All token ids."""
        return self.documents + self.question

    def shortest(self) -> PeerPrompt:
        """Return the beginning, one chunk and the question: the warm-up of every contender."""
        return PeerPrompt(self.pieces[:2], self.question)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PeerPrompt:
        pieces = (Piece(piece["chunk_id"], tuple(piece["ids"]), piece["level"]) for piece in value["pieces"])
        return cls(tuple(pieces), tuple(value["question"]))


@dataclass(frozen=True, slots=True)
class Saved:
    """A prompt state of llama.cpp in a file: what it takes, and the first token after it.

    Attributes
    ----------
    bytes, tokens : of the file, and how many tokens' keys and values are in it.
    save_ms : to write it.
    ttft_ms : to read it from the page cache, to compute the question and to choose the first token.
    """

    bytes: int
    tokens: int
    save_ms: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one process. Milliseconds and bytes; memory is None if it is unknown.

    Attributes
    ----------
    import_ms, model_load_ms : of the libraries, then of the model, until it can be run.
    warm_ms : the first prompt, a short one, and the first two tokens after it: in none of the times below.
    ttft_ms, ttft_cpu_ms : from the prompt's ids to the first token's, by the clock and in processor time.
    decode_ms : of `new_tokens` tokens after the first.
    base_bytes, loaded_bytes, peak_bytes : resident memory of the process with its libraries, with the model, and at its
        peak from then on up to the last token, files mapped into memory included; `mapped_bytes`: of these, in the end.
    ids : the tokens that it chose.
    bytes_read, flops : of a kvtool mode.
    """

    import_ms: float
    model_load_ms: float
    warm_ms: float
    ttft_ms: float
    ttft_cpu_ms: float
    decode_ms: float
    base_bytes: int | None
    loaded_bytes: int | None
    peak_bytes: int | None
    mapped_bytes: int | None
    ids: Ids
    version: str
    build: str
    saved: Saved | None = None
    bytes_read: int | None = None
    flops: int | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measured:
        saved = value["saved"]
        return cls(**{**value, "ids": tuple(value["ids"]), "saved": None if saved is None else Saved(**saved)})


def prompts_file(folder: Path) -> Path:
    """Return the path of the prompts that `prepare` has written, by context."""
    return folder / "prompts.json"


def read_prompt(task: Task) -> PeerPrompt:
    """The prompt of a task."""
    prompts = json.loads(prompts_file(Path(task.folder)).read_text(encoding="utf-8"))
    return PeerPrompt.from_json(prompts[str(task.context)])


@dataclass(frozen=True, slots=True)
class About:
    """Facts of a contender, and its results besides times."""

    version: str
    build: str
    saved: Saved | None = None
    bytes_read: int | None = None
    flops: int | None = None


class Runner(Protocol):
    """A contender with its model loaded."""

    def first(self, prompt: PeerPrompt) -> int:
        """Clear the context, and compute a prompt; return the likeliest next token."""

    def next(self, token: int) -> int:
        """Append a token; return the likeliest next one."""

    def about(self, prompt: PeerPrompt) -> About:
        """Return facts for the report; called last, after all that is timed."""


def hold_to(threads: int) -> None:
    """Keep this process, whatever libraries are in it, on as many cores as it may have threads."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])


def text() -> str:
    """kvtool's own documentation: text of many kinds that comes with every copy of it."""
    folders = resources.files("kvtool").joinpath("docs").iterdir()
    pages = (page for folder in folders for page in folder.iterdir() if page.name.endswith(".md"))
    return "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(pages, key=lambda page: page.name))
