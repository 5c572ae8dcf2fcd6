"""The settings in force: flag > environment > ./kvtool.toml > user config > default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kvtool.core.common.places import data_dir, default_config_file
from kvtool.core.common.urls import is_url
from kvtool.core.errors import UsageError
from kvtool.core.options.settings import (
    ENV_PREFIX,
    PROJECT_FILE,
    RESERVED_ENV,
    Key,
    Settings,
    did_you_mean,
    keys,
    sections,
)


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
        return _file_layer("user", default_config_file(environ))
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


def _expanded(key: Key, value: Any, folder: Path | None = None) -> Any:
    """Expand `~`; make a path in a file relative to that file. URLs stay as they are."""
    if not key.is_path or not value or is_url(value):
        return value
    path = Path(value).expanduser()
    return str(folder / path) if folder else str(path)
