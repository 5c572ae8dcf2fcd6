"""Equations of Office files in one line: `(a+b)/2`, `sqrt(x)`, `x^2`, `∑_(i=1)^n i`."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree.ElementTree import Element

_SIMPLE = re.compile(r"\d+(?:[.,]\d+)?|[^\W\d_]+|\([^()]*\)|.?")


def linear(element: Element) -> str:
    """Write an equation, or a part of one."""
    name = element.tag.removeprefix("m-")
    if name.endswith("Pr") or name in ("w-del", "w-moveFrom"):
        return ""
    if name in _SCRIPTED:
        return _scripted(element, name)
    if name in _FORMS:
        between, form = _FORMS[name]
        return form.format(inside=between.join(filter(None, map(linear, element))))
    if name in _READ:
        return _READ[name](element)
    text, was_run = (element.text or "") if name == "t" else "", True
    for child in element:
        part = linear(child)
        ends = text[-1:].isalnum() or text.endswith(")")
        text += " " if ends and part[:1].isalnum() and (not was_run or child.tag == "m-func") else ""
        text, was_run = text + part, child.tag in ("m-r", "m-t") if part else was_run
    return text


def _of(element: Element, name: str) -> str:
    """Write a part by its name, in parentheses if `(name)` says so and it is more than a number or a word."""
    part = element.find(f"m-{name.strip('()')}")
    text = "" if part is None else linear(part).strip()
    return text if not name.startswith("(") or _SIMPLE.fullmatch(text) else f"({text})"


def _property(element: Element, name: str, usual: str) -> str:
    found = element.find(f"{element.tag}Pr/m-{name}")
    return usual if found is None else found.get("val", "")


def _scripted(element: Element, name: str) -> str:
    """Write what stands below and above: indices and powers, bounds of sums and limits."""
    low = _of(element, "(lim)" if name == "limLow" else "(sub)")
    high = _of(element, "(lim)" if name == "limUpp" else "(sup)")
    marks = f"_{low}" * bool(low) + f"^{high}" * bool(high)
    if name == "nary":
        return f"{_property(element, 'chr', '∫')}{marks} {_of(element, 'e')}"
    if name == "sPre":
        return f"{marks} {_of(element, 'e')}"
    return _of(element, "e" if name.startswith("lim") else "(e)") + marks


def _fraction(element: Element) -> str:
    if _property(element, "type", "") == "noBar":
        return f"{_of(element, 'num')} choose {_of(element, 'den')}"
    return f"{_of(element, '(num)')}/{_of(element, '(den)')}"


def _root(element: Element) -> str:
    degree = _of(element, "deg")
    return f"sqrt{f'[{degree}]' if degree else ''}({_of(element, 'e')})"


def _delimited(element: Element) -> str:
    inside = _property(element, "sepChr", "|").join(map(linear, element.findall("m-e")))
    return _property(element, "begChr", "(") + inside + _property(element, "endChr", ")")


def _function(element: Element) -> str:
    name, argument = _of(element, "fName"), _of(element, "e")
    return name + ("" if name.isalnum() and argument.startswith(("(", "[", "{")) else " ") + argument


_SCRIPTED = ("sSub", "sSup", "sSubSup", "sPre", "nary", "limLow", "limUpp")
_READ: dict[str, Callable[[Element], str]] = {
    **{"f": _fraction, "rad": _root, "d": _delimited, "func": _function},
    "acc": lambda element: _of(element, "e") + _property(element, "chr", "\u0302"),
    "bar": lambda element: _of(element, "e") + "\u0305",
}
_FORMS = {
    "m": ("; ", "[{inside}]"),
    "mr": (", ", "{inside}"),
    "eqArr": ("; ", "{inside}"),
    "oMathPara": ("\n", "{inside}"),
}
