"""Option: declared as a field of a room's options, read back as data, and checked the same way everywhere.

A room declares its options in a frozen dataclass::

    @dataclass(frozen=True, kw_only=True)
    class QueryOptions(Options, sections=("query",)):
        ratio: float = option(0.15, "Share of the cached tokens to recompute.", unit="percentage", lowest=0, highest=1)

The field's name is the name in Python. Its flag, its variable, its key in a configuration file, its help and its
check follow from the declaration: `options_of(QueryOptions)` lists them as `Option`s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from kvtool.core.common.text import seconds, size_in_bytes
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import UsageError, did_you_mean

ENV_PREFIX = "KVTOOL_"
_MOST_TOLD = 12  # choices that an error lists; of more it says what stands for them in the help
T = TypeVar("T")
Unit = Literal["", "duration", "percentage", "size", "path", "text"]


def option(
    default: T,
    help: str,
    *,
    group: str = "",
    flag: str | None = "",
    parameter: str = "",
    synonyms: tuple[str, ...] = (),
    setting: str | bool | None = None,
    metavar: str = "",
    choices: Iterable[str] = (),
    suggest: Iterable[str] = (),
    pattern: str = "",
    check: Callable[[Any], str] | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    unit: Unit = "",
    read: Callable[[str], Any] | None = None,
    instead: str = "",
    several: str = "",
    table: bool = False,
    user_only: bool = False,
) -> T:
    """Declare one option as the default of a dataclass's field.

    Parameters
    ----------
    default : its value if none is given.
    help : one sentence.
    group : the heading of the command's help that lists it; empty: its class's.
    flag : empty: made of the name; `--this/--that` names both flags of a yes or no; None: it has none.
    parameter : its name for `--set NAME=VALUE`; unless it names a flag, too, it has no flag, variable or keyword.
    synonyms : further flags that mean the same and are not shown.
    setting : whether a variable and a configuration file can give it, too; a text names it there, None: as its class
        says.
    metavar : what stands for its value in the help; empty: made of the type, the unit or the choices.
    choices, pattern, check, lowest, highest : what a value has to fulfil; `check` returns the complaint, or nothing.
    suggest : values for completion and for "did you mean".
    unit : how it may be written besides a plain number: `10m`, `15%`, `20GB`; a path is expanded, and one in a file
        is relative to that file, as is the path after the `@` of a text.
    read : makes the value of what a flag, a variable or a file says; Python gives the value itself.
    instead : what the help says of the default.
    several : the hint where a list of its choices is given, though it takes one.
    table : whether its values are `key=value`: a configuration file gives them as a table, Python as a mapping.
    user_only : whether the working folder's file cannot give it, which may be anybody's: only the user's own can.
    """
    declared = locals()
    del declared["default"]
    return field(default=default, metadata=declared)


@dataclass(frozen=True, slots=True)
class Option:
    """An option, as read from the field that declares it; see `option`.

    `optional`: None is a value, too. `setting`: its key in a configuration file and, in capitals, its variable; empty
    if it has none. `sections`: the tables of a configuration file that also know it by its flag's name.
    """

    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    help: str
    group: str
    flag: str
    parameter: str
    synonyms: tuple[str, ...]
    setting: str
    sections: tuple[str, ...]
    metavar: str
    choices: tuple[str, ...]
    suggest: tuple[str, ...]
    pattern: str
    check: Callable[[Any], str] | None
    lowest: float | None
    highest: float | None
    unit: Unit
    read: Callable[[str], Any] | None
    instead: str
    several: str
    table: bool
    user_only: bool

    @property
    def key(self) -> str:
        return self.setting or self.flag

    @property
    def is_keyword(self) -> bool:
        return bool(self.flag) or not self.parameter

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.setting.upper() if self.setting else ""

    def parse(self, text: Any, where: str) -> Any:
        """Read the text of a flag or a variable (or the texts of a repeated flag); `where` names it in an error."""
        if not self.many:
            return self.parse_one(text, where)
        texts = [text] if isinstance(text, str) else text
        if self.choices or self.kind in (int, float):  # none of them has a comma
            texts = [word.strip() for each in texts for word in each.split(",") if word.strip() or not each.strip()]
        values = tuple(self.parse_one(each, where) for each in texts)
        return tuple(dict.fromkeys(values)) if self.choices else values

    def parse_one(self, text: str, where: str) -> Any:
        if self.optional and self.kind in (int, float) and text.strip().lower() == "none":
            return None  # what a lower layer gives is lifted
        if self.kind in (str, Path) or self.unit:
            return self._accept_one(text, where)
        try:
            value = _BOOLEANS[text.strip().lower()] if self.kind is bool else self.kind(text.strip())
        except (KeyError, ValueError):
            raise self._wrong(where, text, f"is not {self._what}") from None
        return self._accept_one(value, where)

    def accept(self, value: Any, where: str) -> Any:
        if value is None and self.optional:
            return None
        if not self.many:
            return self._accept_one(value, where)
        if isinstance(value, str | Path):
            return (self._accept_one(value, where),)
        if self.table and isinstance(value, Mapping):
            value = [f"{name}={each}" for name, each in _flattened(value)]
        if not isinstance(value, Iterable):
            raise self._wrong(where, value, "is no list")
        return tuple(self._accept_one(item, where) for item in value)

    def _accept_one(self, value: Any, where: str) -> Any:
        value = self._typed(value, where)
        complaint = self._text_complaint(str(value)) if self.kind in (str, Path) else self._range_complaint(value)
        if complaint:
            raise self._wrong(where, value, complaint)
        return value

    def _typed(self, value: Any, where: str) -> Any:
        if isinstance(value, str) and self.unit in _READ_UNIT:
            with suppress(ValueError, UsageError):
                value = _READ_UNIT[self.unit](value)
        if type(value) is self.kind or (self.kind is Path and isinstance(value, Path)):
            return value
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind is Path and isinstance(value, str):
            return Path(value)
        if self.kind is str and (isinstance(value, Path) or (type(value) is int and self.choices)):
            return str(value)
        raise self._wrong(where, value, f"is not {self._what}")

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
            short = "|" in self.metavar and (".." in self.metavar or len(self.choices) > _MOST_TOLD)
            return "is none of " + ", ".join(self.metavar.split("|") if short else self.choices)
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"does not fit {self.metavar}"
        return self.check(value) if self.check else ""

    @property
    def default_text(self) -> str:
        if self.instead:
            return self.instead
        if self.unit == "percentage":
            return f"{self.default:.0%}"
        if self.unit == "duration" and self.default:
            return f"{self.default:g}s"
        if self.kind is bool and "/" in self.flag:
            yes, no = self.flag.split("/")
            return "" if self.setting else (yes if self.default else no)
        if self.default in (None, "", False, ()):
            return ""
        return f"{self.default:g}" if self.kind is float else str(self.default)

    @property
    def _what(self) -> str:
        return _UNIT_NAMES.get(self.unit) or _KIND_NAMES[self.kind]

    def _guess(self, value: str) -> str:
        if self.several and "," in value and {part.strip() for part in value.split(",")} <= {*self.choices}:
            return self.several
        return did_you_mean(value, self.choices or self.suggest)

    def _wrong(self, where: str, value: Any, complaint: str) -> UsageError:
        shown = scrubbed(repr(value) if isinstance(value, str) else str(value))
        guess = self._guess(value) if isinstance(value, str) else ""
        default = f"; default {self.default_text}" if self.default_text else ""
        return UsageError(f"{where}: {shown} {complaint}", guess or f"{self.help.rstrip('.')}{default}")


def _flattened(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _percentage(text: str) -> float:
    number = text.strip()
    return float(number[:-1]) / 100 if number.endswith("%") else float(number)


_READ_UNIT: Mapping[str, Callable[[str], Any]] = {
    "duration": seconds,
    "percentage": _percentage,
    "size": size_in_bytes,
}
_UNIT_NAMES = {
    "duration": "a length of time, such as 30d, 12h or 10m",
    "percentage": "a number or a percentage, such as 0.15 or 15%",
    "size": "a size, such as 500MB or 20GB",
}
_UNIT_METAVARS = {"duration": "DURATION", "percentage": "SHARE", "size": "SIZE", "path": "PATH"}
_KIND_NAMES: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
_METAVARS: Mapping[type, str] = {str: "TEXT", int: "N", float: "X", bool: "", Path: "PATH"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


# ---- a room's options ----


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a room's options: a frozen dataclass that checks its values when it is made. Raises UsageError."""

    sections: ClassVar[tuple[str, ...]] = ()  # the tables of a configuration file that may hold its settings
    group: ClassVar[str] = ""  # the heading of the help that lists its options
    settings: ClassVar[bool] = True  # whether variables and files can give them

    def __init_subclass__(cls, sections: tuple[str, ...] = (), group: str = "", settings: bool = True) -> None:
        super().__init_subclass__()
        cls.sections, cls.group, cls.settings = sections, group, settings

    def __post_init__(self) -> None:
        for name, declaration in options_of(type(self)).items():
            given = getattr(self, name)
            if (value := declaration.accept(given, name)) is not given:
                object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other; a room with such rules overrides it."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return these options with the values of a call in Python. Raises UsageError."""
        names = options_of(cls)
        for name in values:
            if name not in names:
                raise UsageError(f"unknown option {name!r}", did_you_mean(name, names) or f"known: {', '.join(names)}")
        return cls(**values)

    @classmethod
    def some(cls, *names: str) -> Part:
        return Part(cls, names)

    @classmethod
    def without(cls, *names: str) -> Part:
        return Part(cls, tuple(name for name in options_of(cls) if name not in names))


@dataclass(frozen=True, slots=True)
class Part:
    source: type[Options]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := set(self.names) - set(options_of(self.source)):
            raise ValueError(f"no options of {self.source.__name__}: {sorted(unknown)}")


_READ: dict[type[Options], Mapping[str, Option]] = {}


def options_of(source: type[Options]) -> Mapping[str, Option]:
    """Return the options of a class by name: first its own in the order of declaration, then those that it shares."""
    if source not in _READ:
        hints = get_type_hints(source)
        owners = {name: each for each in reversed(source.__mro__) for name in vars(each).get("__annotations__", ())}
        declared = [each for each in fields(source) if "help" in each.metadata]
        declared.sort(key=lambda each: owners[each.name] is not source)
        _READ[source] = MappingProxyType(
            {each.name: _read_option(each, hints[each.name], owners[each.name], each.metadata) for each in declared}
        )
    return _READ[source]


def parameters_of(kind: type, prefix: str) -> dict[str, Option]:
    """Return the fields of any dataclass as parameters for `--set PREFIX.FIELD=VALUE`, by field.

    A field may be declared by `option`, which gives its meaning and its range.
    """
    hints = get_type_hints(kind)
    plain = option(None, "").metadata  # type: ignore[attr-defined]
    return {
        each.name: _read_option(
            each, hints[each.name], Options, {**plain, **each.metadata, "parameter": f"{prefix}.{each.name}"}
        )
        for each in fields(kind)
    }


def _read_option(declared: Field[Any], hint: Any, owner: type[Options], metadata: Mapping[str, Any]) -> Option:
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(each for each in union if each is not NoneType)
    many = get_origin(kind) is tuple
    kind = get_args(kind)[0] if many else kind
    assert declared.default is not MISSING
    values = dict(metadata)
    if get_origin(kind) is Literal:
        kind, values["choices"] = str, get_args(kind)
    values["choices"], values["suggest"] = tuple(values["choices"]), tuple(values["suggest"])
    setting = owner.settings if values["setting"] is None else values["setting"]
    values["setting"] = setting if isinstance(setting, str) else declared.name if setting else ""
    values["group"] = values["group"] or owner.group
    dashed = "--" + declared.name.replace("_", "-")
    both = f"{dashed}/--no-{dashed[2:]}" if kind is bool and values["setting"] else dashed
    if values["parameter"] and not values["flag"]:
        values["flag"], values["setting"] = None, ""
    values["flag"] = both if values["flag"] == "" else values["flag"] or ""
    metavar = "|".join(values["choices"]) or _UNIT_METAVARS.get(values["unit"], "") or _METAVARS[kind]
    values["metavar"] = values["metavar"] or metavar
    return Option(
        name=declared.name,
        kind=kind,
        optional=NoneType in union,
        many=many,
        default=declared.default,
        sections=owner.sections,
        **values,
    )
