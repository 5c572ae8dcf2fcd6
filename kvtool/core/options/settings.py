"""What can be set. Which layer decides is `resolve`.

Each key is declared once, as a field of `Settings`; its metadata drive the flag, the environment variable, the
TOML key, the validation, the help text and `kvtool config show`.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvtool.core.codec.levels import LEVELS, MAX_LOSS
from kvtool.core.common.durations import seconds
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import UsageError
from kvtool.core.fusion.names import AUTO, MODES
from kvtool.core.remote.blobs import TIMEOUT
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR, PREDICTORS

ENV_PREFIX = "KVTOOL_"
PROJECT_FILE = "kvtool.toml"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # for a new store; an existing one remembers its own

# Variables that steer the tool itself and are no settings. KVTOOL_TEST_* is left to test suites.
RESERVED_ENV = (
    "KVTOOL_HOME",
    "KVTOOL_CACHE",
    "KVTOOL_CONFIG",
    "KVTOOL_DEBUG",
    "KVTOOL_ATTENTION",
    "KVTOOL_ENTROPY_CODER",
    "KVTOOL_DISK_RESERVE",  # these three size the store's map (core/cache)
    "KVTOOL_MAP_LIMIT",
    "KVTOOL_MAP_START",
)

T = TypeVar("T")


def _key(
    default: T,
    help: str,
    *sections: str,
    flag: str = "",
    metavar: str = "",
    choices: tuple[str, ...] = (),
    suggest: tuple[str, ...] = (),
    pattern: str = "",
    check: Callable[[Any], str] | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    number_too: bool = False,
    is_path: bool = False,
    is_duration: bool = False,
) -> T:
    """Declare one key: its default, its one-line help and what else is known of it (the fields of `Key`)."""
    known = {
        "help": help,
        "sections": sections,
        "flag": flag,
        "metavar": metavar,
        "choices": choices,
        "suggest": suggest,
        "pattern": pattern,
        "check": check,
        "lowest": lowest,
        "highest": highest,
        "number_too": number_too,
        "is_path": is_path,
        "is_duration": is_duration,
    }
    return field(default=default, metadata=known)


FUSIONS = (*MODES, AUTO)
LOAD_TIMEOUT = 10.0  # seconds: what no disk takes for a megabyte unless something is wrong with it
DEFER_FIRST = 2  # chunks; README
LEAD_INS = ("warm", "prefix", "learned", "neighbour", "bos", "none")


def is_lead_in_file(value: str) -> bool:
    """Whether a lead-in is no known name and no `sink:N` with N >= 1: then it names a file."""
    return value not in LEAD_INS and not re.fullmatch(r"sink:[1-9]\d*", value)


def _check_lead_in(value: str) -> str:
    """A known name, `sink:N` with N >= 1, or something that looks like a file."""
    if not is_lead_in_file(value):
        return ""
    if not value.startswith("sink:") and (set(value) & set("./\\") or os.path.exists(value)):
        return ""
    return "is no lead-in: " + "|".join((*LEAD_INS[:-1], "sink:N", "none", "FILE"))


_LEVEL = r"raw|lossless|[1-9]\d*"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, validated. The field's name is the TOML key and, in capitals after `KVTOOL_`, the variable.

    Raises
    ------
    UsageError : a value is of the wrong type or out of range, or two values contradict each other.
    """

    store: str = _key("", "Where the cache lives: a folder or a URL.", metavar="PATH|URL", is_path=True)
    model: str | None = _key(None, "The language model.", metavar="NAME|FOLDER|FILE.gguf|smollm2")
    device: str = _key(
        "auto",
        "Where to compute.",
        metavar="auto|cpu|cuda[:N]|mps",
        suggest=("auto", "cpu", "cuda", "mps"),
        pattern=r"auto|cpu|mps|cuda(:\d+)?",
    )
    dtype: str = _key("auto", "Number format of the model.", choices=("auto", "float32", "bfloat16", "float16"))
    offline: bool = _key(False, "Never touch the network.")
    lock_wait: float = _key(
        10.0, "How long to wait for another kvtool's lock.", metavar="SECONDS|10m", lowest=0, is_duration=True
    )

    split: str = _key(
        "semantic", "How documents are cut.", "ingest", choices=("semantic", "markdown", "paragraph", "fixed")
    )
    chunk_tokens: int = _key(256, "Wanted length of a chunk in tokens.", "ingest", lowest=1)
    min_tokens: int = _key(0, "Shortest chunk; 0 takes what suits the split.", "ingest", lowest=0)
    max_chunk_tokens: int | None = _key(None, "Longest chunk.", "ingest", flag="--max-tokens", lowest=1)
    lead_in: str = _key(
        "warm",
        "What a chunk is prefilled after.",
        "ingest",
        metavar="|".join((*LEAD_INS, "sink:N", "FILE")),
        suggest=LEAD_INS,
        check=_check_lead_in,
    )
    ingest_level: str = _key(
        "raw",
        "Codec level to store at.",
        "ingest",
        flag="--level",
        metavar="raw|lossless|1..N",
        suggest=tuple(LEVELS),
        pattern=_LEVEL,
        number_too=True,
    )

    # Not checked here but against the registry, where a new method is one line (see `Resolved.choose`).
    fusion: str = _key(
        "union",
        "How cached chunks become one prompt.",
        "query",
        metavar="|".join(FUSIONS),
        suggest=FUSIONS,
        pattern=r"\S+",
    )
    top_k: int = _key(5, "How many chunks to find.", "query", lowest=1)
    ratio: float = _key(0.15, "Share of the cached tokens to recompute.", "query", lowest=0, highest=1)
    link_tokens: int = _key(16, "Tokens of every chunk that `epic` recomputes.", "query", lowest=0)
    link: str = _key("initial", "Where in a chunk they stand.", "query", choices=("initial", "final", "boundary"))
    level: str = _key(
        "auto",
        "Codec level to read.",
        "query",
        metavar="raw|lossless|1..N|auto",
        suggest=("auto", *LEVELS),
        pattern=_LEVEL + "|auto",
        number_too=True,
    )
    max_loss: float = _key(
        MAX_LOSS, "What the level `auto` may lose, in nats a token of the answer.", "query", metavar="X", lowest=0
    )
    load_timeout: float = _key(
        LOAD_TIMEOUT,
        "How long reading one record may take; its chunk is computed instead.",
        "query",
        metavar="SECONDS",
        lowest=0.001,
    )
    remote_timeout: float = _key(
        TIMEOUT,
        "How long a shared store may take for a value before it counts as gone.",
        "query",
        metavar="SECONDS",
        lowest=0.001,
    )
    slo_ms: float | None = _key(
        None,
        "The time to the first token that is aimed at: what comes from a shared store, and how fine, follows from it.",
        "query",
        metavar="MS",
        lowest=1,
    )
    stream_predictor: str = _key(
        DEFAULT_PREDICTOR, "How the link to a shared store is predicted.", "query", choices=tuple(PREDICTORS)
    )
    stream_margin: float = _key(
        DEFAULT_MARGIN, "Share of the predicted bandwidth that is not counted on.", "query", lowest=0, highest=0.99
    )
    retriever: str = _key(
        "auto",
        "How chunks are found; auto: by words and, where there are vectors, by meaning.",
        "query",
        choices=("auto", "bm25", "dense", "hybrid"),
    )
    embedder: str | None = _key(
        None, "The embedding model of the chunks' vectors.", "ingest", "query", metavar="NAME|FOLDER"
    )
    order: str = _key(
        "best-last",
        "How found chunks stand in the prompt; with --defer, in each round.",
        "query",
        choices=("relevance", "best-last", "document"),
    )
    defer: bool = _key(False, "Load more chunks only when the answer is unsure.", "query")
    defer_first: int = _key(DEFER_FIRST, "How many chunks --defer loads first.", "query", metavar="N", lowest=1)
    defer_threshold: float | None = _key(
        None,
        "How sure --defer has to be; unset: as `inspect quality --defer` has calibrated.",
        "query",
        metavar="X",
        lowest=0,
    )
    max_tokens: int = _key(256, "Longest answer in tokens.", "query", lowest=1)
    temperature: float = _key(0.0, "Sampling temperature; 0 is greedy.", "query", lowest=0)
    seed: int = _key(0, "Seed of the sampling.", "query", lowest=0, highest=2**63 - 1)
    system: str | None = _key(
        None,
        "A file with the instruction that the prompt begins with.",
        "ingest",
        "query",
        metavar="FILE",
        is_path=True,
    )

    def __post_init__(self) -> None:
        for key in keys().values():
            key.accept(getattr(self, key.name), key.name)
        lengths = [n for n in (self.min_tokens, self.chunk_tokens, self.max_chunk_tokens) if n is not None]
        if lengths != sorted(lengths):
            raise UsageError(
                f"chunk lengths contradict each other: {' > '.join(map(str, lengths))} tokens",
                "min_tokens <= chunk_tokens <= max_chunk_tokens",
            )


# One key, seen as data.


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of one setting, read from the field that declares it.

    Parameters
    ----------
    name : field, TOML key and, in capitals, environment variable.
    kind : `str`, `int`, `float` or `bool`; `optional` says whether None is a value too.
    sections : the commands that take it as a flag; empty for every command.
    flag : its flag, such as `--top-k`.
    choices, pattern, check, lowest, highest : what a value has to fulfil.
    suggest : values for completion and for "did you mean".
    number_too : TOML may write a number where text is meant (`level = 2`).
    is_path : a path in a TOML file is relative to that file; `~` is expanded.
    is_duration : seconds, or a number with a unit (`10m`), in a TOML file too.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    optional: bool
    default: str | int | float | bool | None
    help: str
    sections: tuple[str, ...]
    flag: str
    metavar: str
    choices: tuple[str, ...]
    suggest: tuple[str, ...]
    pattern: str
    check: Callable[[Any], str] | None
    lowest: float | None
    highest: float | None
    number_too: bool
    is_path: bool
    is_duration: bool

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, where: str) -> Any:
        """Read a flag's or a variable's text; `where` names it in the error."""
        if self.kind is str:
            return self.accept(text, where)
        try:
            value = self._read(text)
        except ValueError:
            raise self._wrong(where, text, f"is not {_KIND_NAMES[self.kind]}") from None
        return self.accept(value, where)

    def _read(self, text: str) -> Any:
        if self.is_duration:
            return seconds(text)
        return _boolean(text) if self.kind is bool else self.kind(text.strip())

    def accept(self, value: Any, where: str) -> Any:
        """Check a typed value and return it in the key's own type."""
        if value is None and self.optional:
            return None
        value = self._typed(value, where)
        complaint = self._range_complaint(value) if self.kind is not str else self._text_complaint(value)
        if complaint:
            raise self._wrong(where, value, complaint)
        return value

    def _typed(self, value: Any, where: str) -> Any:
        if self.kind is str and isinstance(value, Path):
            return str(value)
        if self.kind is str and self.number_too and type(value) is int:
            return str(value)
        if self.kind is float and type(value) is int:
            return float(value)
        if self.is_duration and isinstance(value, str):
            with suppress(ValueError):
                return seconds(value)
        if type(value) is not self.kind:
            raise self._wrong(where, value, f"is not {_KIND_NAMES[self.kind]}")
        return value

    def _range_complaint(self, value: float) -> str:
        if not math.isfinite(value):
            return "is not a finite number"
        low, high = self.lowest, self.highest
        if low is not None and high is not None and not low <= value <= high:
            return f"is not between {low} and {high}"
        return f"is less than {low}" if low is not None and value < low else ""

    def _text_complaint(self, value: str) -> str:
        if "\0" in value:
            return "holds a NUL character"
        if self.choices and value not in self.choices:
            return "is none of " + ", ".join(self.choices)
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"does not fit {self.metavar}"
        return self.check(value) if self.check else ""

    def _wrong(self, where: str, value: Any, complaint: str) -> UsageError:
        shown = scrubbed(repr(value) if isinstance(value, str) else str(value))
        guess = did_you_mean(value, self.choices or self.suggest) if isinstance(value, str) else ""
        default = f"; default {self.default}" if self.default not in (None, "") else ""
        return UsageError(f"{where}: {shown} {complaint}", guess or f"{self.help.rstrip('.')}{default}")


_KIND_NAMES: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


@functools.cache
def keys() -> Mapping[str, Key]:
    """Every key by name, in the order of declaration."""
    hints = get_type_hints(Settings)
    return MappingProxyType({f.name: _read_key(f, hints[f.name]) for f in fields(Settings)})


def _read_key(declared: Field[Any], hint: Any) -> Key:
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(t for t in union if t is not NoneType)
    assert declared.default is not MISSING
    known = dict(declared.metadata)
    known["flag"] = known["flag"] or "--" + declared.name.replace("_", "-")
    known["metavar"] = known["metavar"] or "|".join(known["choices"]) or _METAVARS[kind]
    return Key(name=declared.name, kind=kind, optional=NoneType in union, default=declared.default, **known)


_METAVARS: Mapping[type, str] = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: ""}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word.strip().lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


@functools.cache
def sections() -> frozenset[str]:
    """The commands that have settings of their own."""
    return frozenset(section for key in keys().values() for section in key.sections)
