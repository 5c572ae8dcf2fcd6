"""Characters of symbol fonts, whose own codes name pictures."""

from __future__ import annotations

import re

_SYMBOL = (
    "\u0020!∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
    + "\u0000" * 33
    + "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\u0000〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
)
_FONTS = {  # from the codes U+F020 on
    "symbol": {0xF020 + at: each for at, each in enumerate(_SYMBOL) if each != "\u0000"},
    "wingdings": {0xF000 + ord(at): each for at, each in zip("lnoqrx§¨Øàèûüýþ", "●■☐☐☐☒▪☐➢→→✗✓☒☑", strict=True)},
    "wingdings 2": {0xF000 + ord(at): each for at, each in zip("OPQRST£", "✗✓☒☑☒☒☐", strict=True)},
}


def symbol(code: str, font: str) -> str:
    number = int(code, 16) if re.fullmatch("[0-9A-Fa-f]{2,4}", code) else 0
    return glyphs(chr(number + 0xF000 * (0x20 <= number < 0x100)), font) if number else ""


def glyphs(text: str, font: str) -> str:
    return text.translate(_FONTS.get(font.lower(), _FONTS["symbol"]))
