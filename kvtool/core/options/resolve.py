"""The options in force: flag > environment > ./kvtool.toml > user config > default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvtool.core.common.files import default_config_file, read_regular
from kvtool.core.common.urls import is_url
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.options.option import ENV_PREFIX, Option, Options, options_of

PROJECT_FILE = "kvtool.toml"
_MOST_BYTES = 2**20  # of a file of settings
_JOINED = "set"  # the option to which a higher layer adds; of two values of one name the last counts

# Variables that steer the tool itself and are no options. KVTOOL_TEST_* is left to test suites.
RESERVED_ENV = (
    "KVTOOL_HOME",
    "KVTOOL_CACHE",
    "KVTOOL_CONFIG",
    "KVTOOL_DEBUG",
    "KVTOOL_TIMELINE",
    "KVTOOL_ATTENTION",
    "KVTOOL_CPU_FEATURES",
    "KVTOOL_STEPPER",
    "KVTOOL_DISK_RESERVE",  # these three size the store's map (core/cache)
    "KVTOOL_MAP_LIMIT",
)

O = TypeVar("O", bound=Options)  # noqa: E741
Layer = Iterator[tuple[str, Any, "Origin"]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: the layer, and the flag, variable or file itself (empty for a default)."""

    layer: Literal["flag", "environment", "project", "user", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Resolved:
    """Values from flags, variables and files, and the origin of each; both by `Option.key`. `warnings`: of unknown
    variables."""

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    warnings: Sequence[tuple[str, str]] = ()

    def get(self, source: type[O], *names: str, **others: Any) -> O:
        """Return a room's options with the values in force; `names`: only these are looked at. Raises UsageError."""
        options = options_of(source)
        if names:
            options = {name: options[name] for name in names}
        values = {name: self.values[option.key] for name, option in options.items() if option.key in self.values}
        for name, value in values.items():
            if (read := options[name].read) is not None and value is not None:
                values[name] = read(value)
        return source(**values, **others)

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, Origin("default"))


def settings_of(sources: Iterable[type[Options]]) -> dict[str, Option]:
    return {o.setting: o for source in sources for o in options_of(source).values() if o.setting}


def resolve(
    sources: Iterable[type[Options]],
    flags: Mapping[Option, Any] | None = None,
    *,
    config: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Resolved:
    """Bring the layers together.

    `sources`: every room's options: a key in a file that none has is an error, a variable gives a warning. `flags`: as
    text or in the option's own type; None: not given. `config`: in place of the usual user file. `environ`, `folder`:
    None: the process's own. Raises UsageError for an unknown key or a wrong value, even if it is overridden.
    """
    environ = os.environ if environ is None else environ
    names = _Names(sources)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    layers = (
        _user_layer(names, config, environ),
        _file_layer(names, "project", (folder or Path()) / PROJECT_FILE),
        _environment_layer(names, environ),
        _flag_layer(flags or {}),
    )
    for layer in layers:  # lowest first: a higher one overwrites
        for key, value, origin in layer:
            values[key] = (*values.get(key, ()), *value) if key == _JOINED else value
            origins[key] = origin
    return Resolved(values, origins, tuple(_unknown_variables(names, environ)))


class _Names:
    def __init__(self, sources: Iterable[type[Options]]) -> None:
        self.every: dict[str, Option] = {}
        self.tables: dict[str, dict[str, Option]] = {}
        for source in sources:
            for option in options_of(source).values():
                if not option.setting:
                    continue
                self.every[option.setting] = option
                words = (option.flag.partition("/")[0], *option.synonyms)
                flags = [word.removeprefix("--").replace("-", "_") for word in words]
                for section in option.sections:
                    self.tables.setdefault(section, {}).update(dict.fromkeys((option.setting, *flags), option))

    @property
    def variables(self) -> dict[str, Option]:
        return {ENV_PREFIX + name.upper(): option for name, option in self.every.items()}


def _flag_layer(flags: Mapping[Option, Any]) -> Layer:
    for option, value in flags.items():
        if value is None:
            continue
        flag = option.flag.partition("/")[0]
        read = option.parse if isinstance(value, str | list) else option.accept
        yield option.key, _expanded(option, read(value, flag)), Origin("flag", flag)


def _environment_layer(names: _Names, environ: Mapping[str, str]) -> Layer:
    for variable, option in sorted(names.variables.items()):
        if text := environ.get(variable):
            yield option.key, _expanded(option, option.parse(text, variable)), Origin("environment", variable)


def _unknown_variables(names: _Names, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    variables = [*names.variables, *RESERVED_ENV]
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX) and environ[name]):
        if variable not in variables and not variable.startswith("KVTOOL_TEST_"):
            near = difflib.get_close_matches(variable, variables, n=1)
            hint = f"did you mean {near[0]}?" if near else "unset it; `kvtool config show` lists every key"
            yield f"unknown variable {variable} in the environment", hint


def _user_layer(names: _Names, config: str | Path | None, environ: Mapping[str, str]) -> Layer:
    named = config or environ.get("KVTOOL_CONFIG")
    if not named:
        return _file_layer(names, "user", default_config_file(environ))
    path = Path(named).expanduser()
    if not path.exists():
        source = "--config" if config else "KVTOOL_CONFIG"
        raise UsageError(f"{source}: there is no file {path}", "check the path, or leave it out")
    return _file_layer(names, "user", path)


def _file_layer(names: _Names, layer: Literal["project", "user"], path: Path) -> Layer:
    seen: set[str] = set()
    for name, written, option in _named_values(_read_toml(path), names, path):
        if option.key in seen:
            raise UsageError(f"{path}: {option.key} is set twice", "keep one of the two lines")
        if option.user_only and layer == "project":
            raise UsageError(
                f"{path}: {name} is not taken from a working folder, which may be anybody's",
                f"give it as {option.flag}, or in your own file, {default_config_file(os.environ)}",
            )
        seen.add(option.key)
        value = option.accept(written, f"{path}: {name}")
        yield option.key, _expanded(option, value, path.parent), Origin(layer, str(path))


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        data = read_regular(path, _MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES:,} bytes")
        return tomllib.loads(data.decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "one `key = value` a line; text in quotes") from error
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path} cannot be read: {why}", "check the file's permissions") from error


def _named_values(table: Mapping[str, Any], names: _Names, path: Path) -> Iterator[tuple[str, Any, Option]]:
    """Yield the file's values with their options, found by name; in a command's table also by what its flag is
    called."""
    for name, value in table.items():
        if name in names.tables and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield f"{name}.{inner}", inner_value, _known(inner, names.tables[name], path)
        else:
            option = _known(name, names.every, path)
            yield name, value, option


def _known(name: str, options: Mapping[str, Option], path: Path) -> Option:
    try:
        return options[name]
    except KeyError:
        hint = did_you_mean(name, options) or "`kvtool config show` lists every key"
        raise UsageError(f"{path}: unknown key {name!r}", hint) from None


def _expanded(option: Option, value: Any, folder: Path | None = None) -> Any:
    """Expand `~`; make a path in a file relative to that file. URLs stay as they are."""
    if option.unit == "text" and value.startswith("@"):
        return f"@{_path(option, value[1:], folder)}"
    if option.unit != "path" or not value:
        return value
    if option.many:
        return tuple(_path(option, each, folder) for each in value)
    return _path(option, value, folder)


def _path(option: Option, value: Any, folder: Path | None) -> Any:
    if is_url(str(value)):
        return value
    path = Path(value).expanduser()
    return option.kind(folder / path if folder else path)
