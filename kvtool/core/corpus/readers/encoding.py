"""Bytes → text: BOMs, UTF-8, UTF-16, then guesses by the words that are not ASCII. The likeliest reading wins: of
letters by pairs of letters of some language (`letters.txt`, made by `samples/tools/letters.py`), of Chinese characters,
kana and Hangul by how common they are, with a bonus for the encodings that are met most often."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import pairwise

from kvtool.core.corpus.options import is_charset
from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile

Decoded = tuple[str, tuple[str, ...]]
Reader = Callable[[str, bytes], list[Document]]
TextReader = Callable[[str, str], list[Document]]

chosen: ContextVar[str] = ContextVar("chosen", default="")
"""The user's encoding of texts that are not UTF-8; an empty string: it is guessed."""

_SAMPLE = 1 << 17  # bytes that a guess looks at
_BEFORE, _AFTER = 64, 256  # bytes around a non-ASCII one that are taken with it, at least
_FOREIGN = re.compile(rb"[\x80-\xff]")
_BETWEEN = re.compile(rb"[\x00-&(-/:-?]+")  # between words; likewise
_BREAK = re.compile(rb"[\n ]")  # no part of a character in any of these encodings
_REPLACED = "\ufffd"

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: it begins with the same two bytes
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

_BINARY = (
    (b"%PDF-", "a PDF file"),
    (b"PK\x03\x04", "a ZIP archive or office document"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old office document"),
)

_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\v\b\x1b\x1a")) + b"\x7f"

_WRITTEN = re.compile(  # what real text in UTF-16 is made of
    "[\t\n\r\f\x20-\x7e\xa0-\u024f\u0370-\u052f\u0590-\u06ff\u0900-\u0e7f\u1100-\u11ff\u1e00-\u206f"
    "\u20a0-\u20bf\u2100-\u22ff\u2500-\u26ff\u3000-\u30ff\u3130-\u318f\u4e00-\u9fff\uac00-\ud7a3"
    "\uff00-\uffef\U0001f300-\U0001faff]"
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_UTF8_LATIN = re.compile(  # rarely by chance
    r"(?<=[0-9A-Za-z])[¡-ɏ]{1,3}|(?<!\ufffd)[¡-ɏ]{1,3}(?=[0-9A-Za-z])|\bà\b|[‐-⁞€™]"
)
_NO_LETTER = re.compile(r"[\x00-@\[-`{-\x7f\xa0’]")
_L, _SIGN = r"[^\W\d_]", "[\xa0-©«-´¶¸¹»-¿×÷„‚“”•…‹›€™]"
_BROKEN = re.compile("[\x80-\x84\x86-\x9f\ufffd]")
_ODD = re.compile(  # where a wrong encoding shows
    "[\x80-\x84\x86-\x9f\ue000-\uf8ff\ufffd¤¦¨¬¯¸¶\xad†‡‰ƒ˜÷ˆ\u02c0-\u02ff\u2200-\u25ff]"
    f"|{_L}{_SIGN}(?={_L})|[A-Za-zÀ-ɏ](?=[Ͱ-\u06ff])|[Ͱ-\u06ff](?=[A-Za-zÀ-ɏ])"
)
_HEBREW_ENDING = re.compile("[א-ת]{2}[םן](?![א-ת])")  # letters that only end words
_MOST_WORDS = 1200  # bytes that are compared, by costs of -2 ln P in whole numbers: the same on every machine
_ODD_COST, _LETTER_COST, _UNKNOWN_COST, _CAPITAL_COST, _ENDING_BONUS = 50, 8, 18, 3, 8
_SEVEN_BIT = (  # Korean and Japanese for mail
    (re.compile(rb"\x1b\$\)C[^\x0e]*\x0e(?:[!-~]{2})+\x0f"), "iso2022_kr"),
    (re.compile(rb"\x1b\$[@B](?:[!-~]{2})+\x1b\([BJ]"), "iso2022_jp_ext"),
)
_TOUCHED = r"[^\x00-@\[-`{-\x7f–]"  # what a sign or unit does not touch
_MEASURE = re.compile(
    rf"(?<=\d)(?:[¢§±µ½¼¾²³¹×ªº©°»]|µ[A-Za-z]{{1,2}}|–(?=\d))(?!{_TOUCHED})|(?<=[A-Z])±(?=\d)"
    rf"|(?<!{_TOUCHED})(?:[§±©«](?=\d)|(?:[£€¥]|°[CFKNSEWO]|µ[A-Zlms])(?!{_TOUCHED}))"
)
_DIGITS = re.compile(rb"\d+")
_FEW_NULS, _NULS = re.compile(rb"(?<!\0)\0{1,3}(?!\0)"), re.compile(rb"(?<=[^\s\0])\0+(?=[^\s\0])")
_C1 = re.compile("[\x80-\x9f]")
_CONTROL = re.compile(b"[\x01-\x07\x0e-\x19\x1c-\x1f\x7f]")
_ALPHABETS = {  # encoding → how much more often it is met
    **{"cp1252": 14, "iso8859_15": 10, "cp1250": 4, "iso8859_2": 6, "cp1251": 2, "koi8_r": 0, "koi8_u": 0},
    **{"cp1253": 0, "iso8859_7": 0, "cp1254": 6, "cp1255": 4, "iso8859_8": 0, "cp1256": 0, "iso8859_6": 0},
    **{"cp1257": 2, "iso8859_13": 0, "iso8859_4": -4, "cp1258": 0, "cp874": 0, "iso8859_5": 0, "cp737": -8},
    **{"mac_roman": 4, "mac_cyrillic": -6, "cp866": 0, "cp850": -2, "cp852": -6, "cp855": -8, "cp037": -8},
}
_LABELS = {"logical": "iso8859_8", "visual": "iso8859_8", "windows-31j": "cp932"}  # that Python does not know
_VENDOR = re.compile(r"(?:windows|win|cp|dos)-(?=\d)")
_SUPERSETS = {  # encoding → what browsers take its name for (WHATWG Encoding Standard), or a superset of it
    **{"iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-8": "cp1255", "tis-620": "cp874", "iso8859-11": "cp874"},
    **{"shift_jis": "cp932", "euc_jp": "euc_jis_2004", "gb2312": "gb18030", "gbk": "gb18030", "euc_kr": "cp949"},
    "big5": "big5hkscs",
}
_CHARACTERS = {  # encoding → first bytes of its common characters, and of kana and punctuation; frequent characters
    "gb18030": (range(0xB0, 0xD8), range(0xA1, 0xA4), "chinese"),
    "cp932": (range(0x88, 0x98), range(0x81, 0x84), "japanese"),
    "euc_jp": (range(0xB0, 0xD0), range(0xA1, 0xA6), "japanese"),
    "cp949": (range(0xB0, 0xC9), range(0xA1, 0xA4), "korean"),
    "cp950": (range(0xA4, 0xC7), range(0xA1, 0xA4), "taiwanese"),
    "big5hkscs": (range(0xA4, 0xC7), range(0xA1, 0xA4), "taiwanese"),
    "johab": (range(0x88, 0xD4), range(0xD8, 0xDF), "korean"),
}
_KANA, _STOPS = re.compile("[ぁ-んァ-ヺー]"), "、。，"
_FREQUENT_COST, _KANA_COST, _COMMON_COST, _SIGN_COST, _UNCOMMON_COST = 11, 12, 18, 20, 50


def declared_by(pattern: bytes, most: int) -> Callable[[bytes], str]:
    """Make a function that finds the encoding that the first bytes of a file, at most `most`, state."""
    charset = re.compile(pattern, re.IGNORECASE)

    def declared(data: bytes) -> str:
        match = charset.search(data, 0, most)
        return match[1].decode("ascii", "replace") if match else ""

    return declared


def of_text(declared: Callable[[bytes], str] | None = None) -> Callable[[TextReader], Reader]:
    """Make a reader of bytes of one that reads text. `declared` finds the encoding that a file states."""

    def decorate(read: TextReader) -> Reader:
        def read_bytes(source: str, data: bytes) -> list[Document]:
            content, notes = decode(data, declared(data) if declared else "")
            if not content.strip():
                raise EmptyFile("empty")
            first, *others = read(source, content)
            return [replace(first, notes=notes + first.notes), *others]

        return read_bytes

    return decorate


def decode(data: bytes, declared: str = "") -> Decoded:
    """Decode a text, with notes on what was guessed. A declared encoding is used only where UTF-8 fails."""
    if not data or data.isspace():
        raise EmptyFile("empty")
    for magic, name in _BINARY:
        if data.startswith(magic):
            raise BinaryFile(f"binary: {name}", "convert it to text first")
    boms = ((bom, codec) for bom, codec in _BOMS if data.startswith(bom))
    bom, codec = next(boms, (b"", ""))
    if codec == "utf-32-le" and _strict(data[len(bom) :], codec) is None:
        bom, codec = next(boms)  # UTF-16 whose first character is NUL
    text, notes = _repaired(data[len(bom) :], codec) if codec else _without_bom(data, declared)
    if "\0" in text:
        raise BinaryFile("binary: contains NUL")
    return text, notes


def _without_bom(data: bytes, declared: str) -> Decoded:
    if b"\0" in data:
        return _without_nuls(data, declared) or (_utf16(data), ())
    for pattern, codec in _SEVEN_BIT:
        if pattern.search(data):
            read, notes = _repaired(data, codec)
            return read, (f"read as {codec}", *notes)
    text = _strict(data, "utf-8")
    if text is not None:
        _refuse_controls(data, 0.1)
        return text, ()
    named = _as_declared(data, declared.lower())
    if named is not None:
        return named, ()
    if codec := "utf-8" if _is_damaged_utf8(data) else chosen.get():
        return _repaired(data, codec)
    _refuse_controls(data, 0.02)
    codec = _guess(_sample(data), final=len(data) <= _SAMPLE)
    text, notes = _repaired(data, codec)
    return text, (f"not UTF-8, read as {codec}: `--encoding NAME` sets another", *notes)


def _as_declared(data: bytes, label: str) -> str | None:
    codec = _LABELS.get(label) or _VENDOR.sub("cp", label.removeprefix("x-").removesuffix("-i"))
    if not is_charset(codec):
        return None
    text = _strict(data, codec)
    superset = _SUPERSETS.get(codecs.lookup(codec).name)
    if superset and (text is None or _C1.search(text)):
        return _strict(data, superset) or text
    return text


def _without_nuls(data: bytes, declared: str) -> Decoded | None:
    written = b"" if _FEW_NULS.search(data) else _NULS.sub(b" ", data).replace(b"\0", b"")
    is_text = 2 * len(_FOREIGN.findall(written)) <= len(written) or _strict(written, "utf-8")
    if not is_text or not written.strip() or _CONTROL.search(written):
        return None
    text, notes = _without_bom(written, declared)
    return text, (f"{data.count(0)} NUL bytes left out", *notes)


def _strict(data: bytes, codec: str) -> str | None:
    try:
        text = data.decode(codec)
    except (UnicodeError, LookupError, ValueError):
        return None
    return text if isinstance(text, str) else None


def _repaired(data: bytes, codec: str) -> Decoded:
    text = _strict(data, codec)
    if text is not None:
        return text, ()
    text = data.decode(codec, "replace")
    own = data.decode(codec, "ignore").count(_REPLACED)
    return text, (f"{text.count(_REPLACED) - own} invalid {codec} bytes replaced by U+FFFD",)


def _refuse_controls(data: bytes, most: float) -> None:
    sample = data[:_SAMPLE]
    if len(sample.translate(None, _CONTROLS)) < len(sample) * (1 - most):
        raise BinaryFile("binary: full of control characters")


def _is_damaged_utf8(data: bytes) -> bool:
    """Return True if at most one non-ASCII character in five is invalid UTF-8, or half of them among Western words."""
    sample = data[: _SAMPLE * 8]
    text = sample.decode("utf-8", "replace")
    bad = text.count("\ufffd") - sample.count(b"\xef\xbf\xbd")
    good = len(_NOT_ASCII.findall(text)) - bad
    if len(_NOT_ASCII.findall(_UTF8_LATIN.sub("", text))) == text.count(_REPLACED):
        return good >= bad
    return good >= 4 * bad


def _utf16(data: bytes) -> str:
    best, most = "", 0  # ASCII characters
    for text in filter(None, (_strict(data, codec) for codec in ("utf-16-le", "utf-16-be"))):
        sample = text[:_SAMPLE]
        count = len(sample) - len(_NOT_ASCII.findall(sample))
        if "\0" not in text and count > most and len(_WRITTEN.findall(sample)) >= 0.97 * len(sample):
            best, most = text, count
    if not best:
        raise BinaryFile("binary: contains NUL")
    return best


def _sample(data: bytes) -> bytes:
    """Choose the first non-ASCII bytes with their context, from ASCII or a break to a break: no character is torn."""
    if len(data) <= _SAMPLE:
        return data
    pieces: list[bytes] = []
    at, left = 0, _SAMPLE
    while left > 0 and (foreign := _FOREIGN.search(data, at)):
        start = max(at, foreign.start() - _BEFORE)
        found = _BREAK.search(data, min(foreign.end() + _AFTER, start + left), start + left)
        at = found.end() if found else start + left
        pieces.append(data[start:at])
        left = left - (at - start) if found else 0
    return b"".join(pieces)


def _guess(sample: bytes, final: bool) -> str:
    found = (_DIGITS.sub(b"0", word) for word in _BETWEEN.split(sample) if _FOREIGN.search(word))
    words = b" ".join(dict.fromkeys(found))[:_MOST_WORDS]
    costs = {}
    for codec in (*_ALPHABETS, *_CHARACTERS):
        text = _decoded(words, codec, final and len(words) < _MOST_WORDS)
        broken = len(_BROKEN.findall(_decoded(sample, codec, final)))
        cost = _cost_of_characters(text, codec) if codec in _CHARACTERS else _cost_of_letters(text) - _ALPHABETS[codec]
        costs[codec] = cost + _ODD_COST * (broken + _oddities(text))
    best = min(costs, key=costs.__getitem__)
    text = _decoded(words, best, final)
    if 3 * _oddities(text) > len(_NOT_ASCII.findall(text)):
        raise BinaryFile("binary, or in an unknown encoding", "save it as UTF-8")
    return best


def _decoded(data: bytes, codec: str, final: bool) -> str:
    return codecs.getincrementaldecoder(codec)("replace").decode(data, final)


def _oddities(text: str) -> int:
    """Count what no writer writes: signs within words, words of two scripts, capitals after small letters."""
    text = _MEASURE.sub("", text)
    capitals = sum(a.islower() and b.isupper() and not (a + b).isascii() for a, b in pairwise(text))
    return len(_ODD.findall(text)) + capitals


def _cost_of_letters(text: str) -> int:
    capitals = sum(a.isalpha() and b.isupper() and not b.isascii() for a, b in pairwise(text))
    endings = len(_HEBREW_ENDING.findall(text))
    text = _NO_LETTER.sub(" ", "".join(char.lower()[:1] for char in _MEASURE.sub("", text)))
    pairs = Counter(map("".join, zip(f" {text}", f"{text} ", strict=True)))
    del pairs["  "]
    return min(
        sum(count * (costs.get(pair) or costs.get(pair[0] + "*", _UNKNOWN_COST)) for pair, count in pairs.items())
        for costs in _languages()
    ) + (_CAPITAL_COST * capitals - _ENDING_BONUS * endings)


@cache
def _data() -> dict[str, list[str]]:
    lines = (files(__package__) / "letters.txt").read_text(encoding="utf-8").splitlines()
    return {name: fields for name, *fields in (line.split("\t") for line in lines)}


@cache
def _languages() -> tuple[dict[str, int], ...]:
    tables = [enumerate(classes) for name, classes in _data().items() if len(name) == 2]
    return tuple({each[at : at + 2]: cost for cost, each in table for at in range(0, len(each), 2)} for table in tables)


def _cost_of_characters(text: str, codec: str) -> int:
    common, signs, frequent = _CHARACTERS[codec]
    cost = _LETTER_COST * sum(char.isascii() and char.isalpha() for char in text)
    for char in _NOT_ASCII.findall(text):
        first, second, *_ = code = (*char.encode(codec, "replace"), 0)
        if char in _data()[frequent][0]:
            cost += _FREQUENT_COST
        elif char in _STOPS or (frequent == "japanese" and _KANA.match(char)):
            cost += _KANA_COST
        elif first in common and len(code) == 3 and (second > 0xA0 or codec not in ("cp949", "gb18030")):
            cost += _COMMON_COST
        else:
            cost += _SIGN_COST if first in signs else _UNCOMMON_COST
    return cost
