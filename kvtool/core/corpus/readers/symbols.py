"""Characters of symbol fonts, whose own codes name pictures."""

from __future__ import annotations

import re

_SYMBOL = (
    "\u0020!∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
    + "\u0000" * 33
    + "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\u0000〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
)
_WINGDINGS = {0x6C: "●", 0x6E: "■", 0x6F: "☐", 0x71: "☐", 0x72: "☐", 0xA7: "▪", 0xA8: "☐", 0xD8: "➢", 0xDF: "←"}
_WINGDINGS |= {0xE0: "→", 0xE1: "↑", 0xE2: "↓", 0xE8: "→", 0xF0: "⇨", 0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☑"}
_WINGDINGS |= {0x4A: "☺", 0x4C: "☹", 0x22: "✂", 0x28: "☎", 0x2A: "✉", 0xAB: "★", 0x9F: "•", 0x78: "☒"}
_FONTS = {
    "symbol": {32 + at: each for at, each in enumerate(_SYMBOL) if each != "\u0000"},
    "wingdings": _WINGDINGS,
    "wingdings 2": {0x4F: "✗", 0x50: "✓", 0x51: "☒", 0x52: "☑", 0x53: "☒", 0x54: "☒", 0xA3: "☐", 0x97: "•"},
}


def symbol(code: str, font: str) -> str:
    """Write a symbol that is given by the number of its code, in hexadecimal."""
    number = int(code, 16) if re.fullmatch("[0-9A-Fa-f]{2,4}", code) else 0
    return glyphs(chr(number + 0xF000 if 0x20 <= number < 0x100 else number), font) if number else ""


def glyphs(text: str, font: str) -> str:
    """Write what a symbol font shows for the codes from U+F020 on; others, and unknown ones, stay."""
    if all(not "\uf020" <= each <= "\uf0ff" for each in text):
        return text
    shown = _FONTS.get(font.lower(), _FONTS["symbol"])
    return "".join(shown.get(ord(each) - 0xF000, each) if "\uf020" <= each <= "\uf0ff" else each for each in text)
