"""Equations of Office files, and MathML, in one line: `(a+b)/2`, `sqrt(x)`, `x^2`, `∑_(i=1)^n i`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element

_SIMPLE = re.compile(r"\d+(?:[.,]\d+)?|[^\W\d_]+|\([^()]*\)|.?")
_MARKS = {  # before the second part, and before the third
    **dict.fromkeys(("f", "mfrac"), "/"),
    **dict.fromkeys(("sSub", "msub", "limLow", "munder"), "_"),
    **dict.fromkeys(("sSup", "msup", "limUpp", "mover"), "^"),
    **dict.fromkeys(("sSubSup", "msubsup", "munderover"), "_^"),
}
_LISTS = {"m": "; ", "mtable": "; ", "mr": ", ", "mtr": ", ", "eqArr": "; ", "oMathPara": "\n"}
_UNSEEN = ("w-del", "w-moveFrom", "annotation", "annotation-xml")


def linear(element: Element) -> str:
    name = _name(element)
    children = [each for each in element if not _name(each).endswith("Pr") and _name(each) not in _UNSEEN]
    parts = [linear(each) for each in children]
    if name in _LISTS:
        text = _LISTS[name].join(filter(None, parts))
        return f"[{text}]" if name in ("m", "mtable") else text
    *before, last = [part.strip() for part in parts] or [""]
    if name in _MARKS and before:
        is_choice = name == "f" and _property(element, "type", "") == "noBar"
        return f"{before[0]} choose {last}" if is_choice else _marked(_grouped(before[0]), name, [*before[1:], last])
    if name in ("nary", "sPre"):
        sign = _property(element, "chr", "∫") if name == "nary" else ""
        return f"{_marked(sign, 'sSubSup', before)} {last}"
    if name in ("rad", "mroot"):
        degree, inside = ("".join(before), last) if name == "rad" else (last, "".join(before))
        return f"sqrt{degree and f'[{degree}]'}({inside})"
    if name == "d":
        inside = _property(element, "sepChr", "|").join(parts)
        return _property(element, "begChr", "(") + inside + _property(element, "endChr", ")")
    if name == "func":
        function = "".join(before)
        return function + " " * (not (function.isalnum() and last.startswith(("(", "[", "{")))) + last
    if name in ("acc", "bar"):
        return last + (_property(element, "chr", "\u0302") if name == "acc" else "\u0305")
    text = _joined(element, zip(children, parts, strict=True))
    return f"sqrt({text})" if name == "msqrt" else text


def _name(element: Element) -> str:
    return element.tag.rpartition(":")[2].removeprefix("m-")


def _joined(element: Element, parts: Iterable[tuple[Element, str]]) -> str:
    text, was_run = (element.text or "") if _name(element) == "t" else (element.text or "").strip(), True
    for child, part in parts:
        ends = text[-1:].isalnum() or text.endswith(")")
        text += " " if ends and part[:1].isalnum() and (not was_run or child.tag == "m-func") else ""
        text, was_run = text + part, child.tag in ("m-r", "m-t") if part else was_run
    return text


def _grouped(text: str) -> str:
    return text if _SIMPLE.fullmatch(text) else f"({text})"


def _marked(base: str, name: str, others: Iterable[str]) -> str:
    return base + "".join(f"{mark}{_grouped(part)}" for mark, part in zip(_MARKS[name], others, strict=False) if part)


def _property(element: Element, name: str, usual: str) -> str:
    found = element.find(f"{element.tag}Pr/m-{name}")
    return usual if found is None else found.get("val", "")
