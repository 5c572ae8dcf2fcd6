"""Settings: flag > environment > ./kvtool.toml > user config > default.

Each key is declared once, as a field of `Settings`; its metadata drive the flag, the environment variable, the
TOML key, the validation, the help text and `kvtool config show`.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvtool.core.errors import UsageError

ENV_PREFIX = "KVTOOL_"
PROJECT_FILE = "kvtool.toml"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # for a new store; an existing one remembers its own

# Variables that steer the tool itself and are no settings. KVTOOL_TEST_* is left to test suites.
RESERVED_ENV = (
    "KVTOOL_HOME",
    "KVTOOL_CACHE",
    "KVTOOL_CONFIG",
    "KVTOOL_DEBUG",
    "KVTOOL_DISK_RESERVE",  # these three size the store's map (core/cache)
    "KVTOOL_MAP_LIMIT",
    "KVTOOL_MAP_START",
)

T = TypeVar("T")


# Where things live.


def data_dir() -> Path:
    """Folder of the default store (`$KVTOOL_HOME/data`, else the platform's user data folder)."""
    return _state_folder("data")


def cache_dir() -> Path:
    """Folder of what can be made again (`$KVTOOL_CACHE`, `$KVTOOL_HOME/cache`, else the platform's cache folder)."""
    override = os.environ.get("KVTOOL_CACHE")
    return Path(override).expanduser() if override else _state_folder("cache")


def config_file() -> Path:
    """The user's config file (`$KVTOOL_CONFIG`, `$KVTOOL_HOME/config.toml`, else the platform's); it need not exist."""
    override = os.environ.get("KVTOOL_CONFIG")
    return Path(override).expanduser() if override else _default_config_file(os.environ)


def _default_config_file(environ: Mapping[str, str]) -> Path:
    home = environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / "config.toml"
    import platformdirs

    return platformdirs.user_config_path("kvtool", appauthor=False) / "config.toml"


def _state_folder(kind: Literal["data", "cache"]) -> Path:
    home = os.environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / kind
    import platformdirs

    find = platformdirs.user_data_path if kind == "data" else platformdirs.user_cache_path
    folder = find("kvtool", appauthor=False)
    if not folder.is_absolute():  # an unexpanded "~": neither HOME nor an entry in the user database
        raise UsageError(f"no {kind} folder: this user has no home folder", "set KVTOOL_HOME to a writable folder")
    return folder


# Declaring a key.


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
    }
    return field(default=default, metadata=known)


FUSIONS = ("full", "prefix", "reuse", "epic", "blend")  # the registry needs torch, its names must not
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
    lock_wait: float = _key(10.0, "How long to wait for another kvtool's lock.", metavar="SECONDS", lowest=0)

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
        suggest=("raw", "lossless", "1"),
        pattern=_LEVEL,
        number_too=True,
    )

    # Not checked here but against the registry, where a new method is one line (see `Resolved.choose`).
    fusion: str = _key(
        "blend",
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
        suggest=("raw", "lossless", "1", "auto"),
        pattern=_LEVEL + "|auto",
        number_too=True,
    )
    retriever: str = _key("bm25", "How chunks are found.", "query", choices=("bm25",))
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

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, where: str) -> Any:
        """Read a flag's or a variable's text; `where` names it in the error."""
        if self.kind is str:
            return self.accept(text, where)
        try:
            value = _boolean(text) if self.kind is bool else self.kind(text.strip())
        except ValueError:
            raise self._wrong(where, text, f"is not {_KIND_NAMES[self.kind]}") from None
        return self.accept(value, where)

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
        shown = repr(value) if isinstance(value, str) else str(value)
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


# Layers.


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: the layer, and the flag, variable or file itself (empty for a default)."""

    layer: Literal["flag", "environment", "project", "user", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings in force and where each value came from."""

    settings: Settings
    origins: Mapping[str, Origin]

    def given(self, name: str) -> bool:
        """Whether anybody asked for this value (it is not the default)."""
        return self.origins[name].layer != "default"

    def choose(self, name: str, known: Iterable[str]) -> str:
        """The value of a key whose choices a registry knows, checked against them.

        Raises
        ------
        UsageError : it is none of `known`; the message names the flag, variable or file.
        """
        value, known = str(getattr(self.settings, name)), list(known)
        if value not in known:
            where = _at(self.origins[name], name)
            hint = did_you_mean(value, known) or "known: " + ", ".join(known)
            raise UsageError(f"{where}: no such {name.replace('_', ' ')}: {value!r}", hint)
        return value


def _at(origin: Origin, name: str) -> str:
    """How an error names a key: `--ratio`, `KVTOOL_RATIO` or `kvtool.toml: ratio`."""
    return f"{origin.where}: {name}" if origin.layer in ("project", "user") else origin.where or name


def resolve(
    flags: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> Resolved:
    """Bring the layers together.

    Parameters
    ----------
    flags : key → value as text or in its own type; None means not given. `config` names the user config file.
    environ : the environment, `os.environ` when None.
    folder : where `kvtool.toml` is looked for, the working folder when None.

    Raises
    ------
    UsageError : any layer holds an unknown key or a wrong value, even one that a higher layer overrides.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    environ = os.environ if environ is None else environ
    config = given.pop("config", None)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(keys(), Origin("default"))
    layers = (
        _user_layer(config, environ),
        _file_layer("project", (folder or Path()) / PROJECT_FILE),
        _environment_layer(environ),
        _flag_layer(given),
    )
    for layer in layers:  # lowest first: a higher one overwrites
        for name, value, origin in layer:
            values[name], origins[name] = value, origin
    if not values.get("store"):
        values["store"] = str(data_dir() / "store")
    return Resolved(Settings(**values), MappingProxyType(origins))


Layer = Iterator[tuple[str, Any, Origin]]


def _flag_layer(given: Mapping[str, Any]) -> Layer:
    for name, value in given.items():
        key = keys().get(name)
        if key is None:
            raise UsageError(f"unknown setting {name!r}", did_you_mean(name, keys()))
        value = key.parse(value, key.flag) if isinstance(value, str) else key.accept(value, key.flag)
        yield name, _expanded(key, value), Origin("flag", key.flag)


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    known = {key.env: key for key in keys().values()}
    for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
        if variable in RESERVED_ENV or variable.startswith("KVTOOL_TEST_") or not environ[variable]:
            continue
        key = known.get(variable)
        if key is None:
            guess = difflib.get_close_matches(variable, [*known, *RESERVED_ENV], n=1)
            hint = f"did you mean {guess[0]}?" if guess else "unset it; `kvtool config show` lists every key"
            raise UsageError(f"unknown variable {variable} in the environment", hint)
        value = key.parse(environ[variable], variable)
        yield key.name, _expanded(key, value), Origin("environment", variable)


def _user_layer(config: str | Path | None, environ: Mapping[str, str]) -> Layer:
    named = config or environ.get("KVTOOL_CONFIG")
    if not named:
        return _file_layer("user", _default_config_file(environ))
    path = Path(named).expanduser()
    if not path.exists():
        source = "--config" if config else "KVTOOL_CONFIG"
        raise UsageError(f"{source}: there is no file {path}", "check the path, or leave it out")
    return _file_layer("user", path)


def _file_layer(layer: Literal["project", "user"], path: Path) -> Layer:
    table = _read_toml(path)
    seen: set[str] = set()
    for name, written, key in _named_values(table, path):
        if key.name in seen:
            raise UsageError(f"{path}: {key.name} is set twice", "keep one of the two lines")
        seen.add(key.name)
        value = key.accept(written, f"{path}: {name}")
        yield key.name, _expanded(key, value, path.parent), Origin(layer, str(path))


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "one `key = value` a line; text in quotes") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the file's permissions") from error


def _named_values(table: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any, Key]]:
    """The file's values with their keys: at the top level by name, in a command's table also as its flag is called."""
    for name, value in table.items():
        if name in sections() and isinstance(value, dict):
            names = _names_in(name)
            for inner, inner_value in value.items():
                yield f"{name}.{inner}", inner_value, _known_key(inner, names, path)
        else:
            yield name, value, _known_key(name, keys(), path)


def _names_in(section: str) -> Mapping[str, Key]:
    mine = [key for key in keys().values() if section in key.sections]
    return {key.name: key for key in mine} | {key.flag[2:].replace("-", "_"): key for key in mine}


def _known_key(name: str, known: Mapping[str, Key], path: Path) -> Key:
    try:
        return known[name]
    except KeyError:
        hint = did_you_mean(name, known) or "`kvtool config show` lists every key"
        raise UsageError(f"{path}: unknown key {name!r}", hint) from None


@functools.cache
def sections() -> frozenset[str]:
    """The commands that have settings of their own."""
    return frozenset(section for key in keys().values() for section in key.sections)


def _expanded(key: Key, value: Any, folder: Path | None = None) -> Any:
    """Expand `~`; make a path in a file relative to that file. URLs stay as they are."""
    if not key.is_path or not value or "://" in value:
        return value
    path = Path(value).expanduser()
    return str(folder / path) if folder else str(path)
