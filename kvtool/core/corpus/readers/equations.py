"""Equations of Office files in one line: `(a)/(b)`, `sqrt(x)`, `x^2`, `∑_(i=1)^n i`."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

_SIMPLE = re.compile(r"\d+(?:[.,]\d+)?|[^\W\d_]+|\([^()]*\)|.?")
_UNSEEN = ("w-del", "w-moveFrom", "w-rPr")


def linear(element: Element) -> str:
    """Write an equation, or a part of one."""
    name = element.tag.removeprefix("m-")
    if name == "t":
        return element.text or ""
    if name.endswith("Pr") or element.tag in _UNSEEN:
        return ""
    if (form := _FORMS.get(name)) is not None:
        return form(element)
    text, was_run = "", True
    for child in element:
        part = linear(child)
        if text[-1:].isalnum() and part[:1].isalnum() and not (was_run and child.tag != "m-func"):
            text += " "
        text, was_run = text + part, child.tag in ("m-r", "m-t") if part else was_run
    return text


def _of(element: Element, name: str) -> str:
    part = element.find(f"m-{name}")
    return "" if part is None else linear(part)


def _grouped(text: str) -> str:
    return text if _SIMPLE.fullmatch(text := text.strip()) else f"({text})"


def _property(element: Element, name: str, usual: str) -> str:
    found = element.find(f"m-{element.tag[2:]}Pr/m-{name}")
    return usual if found is None else found.get("val", "")


def _fraction(element: Element) -> str:
    top, bottom = _of(element, "num"), _of(element, "den")
    if _property(element, "type", "") == "noBar":
        return f"{top} choose {bottom}"
    return f"{_grouped(top)}/{_grouped(bottom)}"


def _root(element: Element) -> str:
    degree = _of(element, "deg")
    return f"sqrt{f'[{degree}]' if degree else ''}({_of(element, 'e')})"


def _scripts(element: Element) -> str:
    """Write what stands below and above: indices and powers, bounds of sums and limits."""
    low, high = _of(element, "sub"), _of(element, "sup")
    if element.tag in ("m-limLow", "m-limUpp"):
        low, high = (_of(element, "lim"), "")[:: 1 if element.tag == "m-limLow" else -1]
    marks = (f"_{_grouped(low)}" if low else "") + (f"^{_grouped(high)}" if high else "")
    base = _of(element, "e")
    if element.tag == "m-nary":
        return f"{_property(element, 'chr', '∫')}{marks} {base}"
    if element.tag == "m-sPre":
        return f"{marks} {base}"
    return (base if element.tag.startswith("m-lim") else _grouped(base)) + marks


def _delimited(element: Element) -> str:
    inside = _property(element, "sepChr", "|").join(linear(each) for each in element.findall("m-e"))
    return _property(element, "begChr", "(") + inside + _property(element, "endChr", ")")


def _function(element: Element) -> str:
    name, argument = _of(element, "fName"), _of(element, "e")
    return name + ("" if name.isalnum() and argument.startswith(("(", "[", "{")) else " ") + argument


def _matrix(element: Element) -> str:
    return "[" + "; ".join(", ".join(map(linear, row.findall("m-e"))) for row in element.findall("m-mr")) + "]"


def _lines(element: Element) -> str:
    return "; ".join(linear(each) for each in element.findall("m-e"))


def _accented(element: Element) -> str:
    mark = "\u0305" if element.tag == "m-bar" else _property(element, "chr", "\u0302")
    return _of(element, "e") + mark


_FORMS = {
    "oMathPara": lambda element: "\n".join(filter(None, map(linear, element))),
    **{"f": _fraction, "rad": _root, "d": _delimited, "func": _function, "m": _matrix, "eqArr": _lines},
    **{"acc": _accented, "bar": _accented},
    **dict.fromkeys(("sSub", "sSup", "sSubSup", "sPre", "nary", "limLow", "limUpp"), _scripts),
}
