"""Bytes → text: BOMs, UTF-8, UTF-16, then the legacy encodings.

Guessing happens only where UTF-8 fails. Rules recognise encodings by the characters that they should yield, for which a
sentence is enough; charset-normalizer decides the rest. Without rules it misreads short texts: of the tests'
sentences those in EUC-JP, Latin-1, ISO 8859-2, KOI8-R and GBK.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile

Decoded = tuple[str, tuple[str, ...]]
Reader = Callable[[str, bytes], list[Document]]
TextReader = Callable[[str, str], list[Document]]

_SAMPLE = 1 << 17  # bytes that a guess looks at
_BEFORE, _AFTER = 64, 256  # bytes around a non-ASCII one that are taken with it, at least
_FOREIGN = re.compile(rb"[\x80-\xff]")
_BREAK = re.compile(rb"[\n ]")  # no part of a character in any of these encodings
# Python's text encodings that are no file's: some of them take quadratic time.
_NO_CHARSETS = frozenset(("punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined", "mbcs", "oem"))

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
_HANGUL = re.compile("[가-힣]")
_HANGUL_RUN = re.compile("[가-힣]{2,}")
_KANA = re.compile("[ぁ-んァ-ヺー]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_CJK_RUN = re.compile(r"[^\x00-\x7f]{2,}")
_WESTERN = re.compile("[À-ÖØ-ÜÞ-öø-üþÿŒœŸ«»‹›“”„‘’‚–—…•·°§©®™£€¢¥¿¡\xa0ªº´²³½¼¾×±]")
# signs inside a word are another code page's letters (ł ą ż ş)
_NOT_WESTERN = re.compile(r"[^\W\d_ªº²³¹¼½¾][³¹¿¼¾±]|(?<!\d)[³¹¼¾±º][^\W\d_]")
_CYRILLIC = re.compile("[А-яЁё]")
_CENTRAL = re.compile("[ąćęłńóśźżáčďéěíňřšťúůýžĺľôŕäöőüű„”“’–…«»\xa0]", re.IGNORECASE)


def of_text(declared: Callable[[bytes], str] = lambda data: "") -> Callable[[TextReader], Reader]:
    """Make a reader of bytes of one that reads decoded text.

    Parameters
    ----------
    declared : the encoding that a file's bytes say they have, or an empty string.
    """

    def decorate(read: TextReader) -> Reader:
        def read_bytes(source: str, data: bytes) -> list[Document]:
            content, notes = decode(data, declared(data))
            if not content.strip():
                raise EmptyFile("empty")
            first, *others = read(source, content)
            return [replace(first, notes=notes + first.notes), *others]

        return read_bytes

    return decorate


def decode(data: bytes, declared: str = "") -> Decoded:
    """Decode a file.

    Parameters
    ----------
    data : the file's bytes.
    declared : the encoding the file itself names, if any; used only where UTF-8 fails.

    Returns
    -------
    The text without its BOM, and notes on anything that was guessed or replaced.

    Raises
    ------
    EmptyFile, BinaryFile
        If the bytes are empty or not text.
    """
    if not data or data.isspace():
        raise EmptyFile("empty")
    for magic, name in _BINARY:
        if data.startswith(magic):
            raise BinaryFile(f"binary: {name}", "convert it to text first")
    text, notes = _with_bom(data) or _without_bom(data, declared)
    if "\0" in text:
        raise BinaryFile("binary: contains NUL")
    return text, notes


def _with_bom(data: bytes) -> Decoded | None:
    for bom, codec in _BOMS:
        if data.startswith(bom):
            body = data[len(bom) :]
            if codec == "utf-32-le" and _strict(body, codec) is None:
                continue  # UTF-16 whose first character is NUL
            return _repaired(body, codec)
    return None


def _without_bom(data: bytes, declared: str) -> Decoded:
    if b"\0" in data:
        return _utf16(data), ()
    text = _strict(data, "utf-8")
    if text is not None:
        _refuse_controls(data, 0.1)
        return text, ()
    named = _strict(data, declared) if _is_charset(declared) else None
    if named is not None:
        return named, ()
    if _is_damaged_utf8(data):
        return _repaired(data, "utf-8")
    return _legacy(data)


def _is_charset(name: str) -> bool:
    try:
        return bool(name) and codecs.lookup(name).name.replace("-", "_") not in _NO_CHARSETS
    except (LookupError, ValueError):
        return False


def _strict(data: bytes, codec: str) -> str | None:
    try:
        text = data.decode(codec)
    except (UnicodeError, LookupError, ValueError):
        return None
    return text if isinstance(text, str) else None


def _repaired(data: bytes, codec: str) -> Decoded:
    """Decode with U+FFFD in the place of invalid bytes, and say so."""
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
    """Return True if most non-ASCII characters are valid UTF-8 and only a few bytes are not."""
    sample = data[: _SAMPLE * 8]
    text = sample.decode("utf-8", "replace")
    bad = text.count("\ufffd") - sample.count(b"\xef\xbf\xbd")
    good = len(_NOT_ASCII.findall(text)) - bad
    return good >= 4 * bad


def _utf16(data: bytes) -> str:
    """Decode UTF-16 without BOM, in the byte order that yields more spaces and ASCII."""
    texts = (_strict(data, codec) for codec in ("utf-16-le", "utf-16-be"))
    written = [text for text in texts if text and "\0" not in text and _is_written(text)]
    if not written:
        raise BinaryFile("binary: contains NUL")
    return max(written, key=_ascii_count)


def _is_written(text: str) -> bool:
    sample = text[:_SAMPLE]
    return len(_WRITTEN.findall(sample)) >= 0.97 * len(sample) and _ascii_count(text) > 0


def _ascii_count(text: str) -> int:
    sample = text[:_SAMPLE]
    return len(sample) - len(_NOT_ASCII.findall(sample))


def _legacy(data: bytes) -> Decoded:
    _refuse_controls(data, 0.02)
    codec = _guess(_sample(data), final=len(data) <= _SAMPLE)
    text, notes = _repaired(data, codec)
    return text, (f"not UTF-8, read as {codec}", *notes)


def _sample(data: bytes) -> bytes:
    """Return the bytes to detect the encoding by: the first non-ASCII bytes with their context; all of a small file.

    Every piece begins after ASCII or a break and ends at a break, so that no character is torn; only the last one may
    be cut anywhere, if a text has no breaks.
    """
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


def _opened(sample: bytes, codec: str, final: bool) -> str | None:
    """Decode the sample, without a character that is torn at its end unless that is the end of the file."""
    try:
        return codecs.getincrementaldecoder(codec)().decode(sample, final)
    except UnicodeError:
        return None


def _guess(sample: bytes, final: bool) -> str:
    for codec, fits in _RULES:
        text = _opened(sample, codec, final)
        if text is not None and fits(text, codec):
            return codec
    return _normalizer_guess(sample)


def _normalizer_guess(sample: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(sample).best()
    if best is None:
        raise BinaryFile("binary, or in an unknown encoding", "save it as UTF-8")
    return str(best.encoding)


def _share(pattern: re.Pattern[str], text: str) -> float:
    """Return the share of the non-ASCII characters that match."""
    others = _NOT_ASCII.findall(text)
    return len(pattern.findall(text)) / len(others) if others else 0.0


def _is_korean(text: str, codec: str) -> bool:
    """Mostly Hangul, in runs, of the 2,350 common syllables (lead ≥ B0, trail ≥ A1)."""
    syllables = "".join(_HANGUL.findall(text))
    if _share(_HANGUL, text) < 0.8:
        return False
    in_runs = sum(map(len, _HANGUL_RUN.findall(text)))
    common = sum(lead >= 0xB0 and trail >= 0xA1 for lead, trail in _pairs(syllables, codec))
    return in_runs >= 0.5 * len(syllables) and common >= 0.9 * len(syllables)


def _is_japanese(text: str, codec: str) -> bool:
    """Kana among the kanji, and none of the half-width kana that other encodings turn into."""
    return _share(_KANA, text) >= 0.25 and _share(re.compile("[\uff61-\uff9f]"), text) < 0.1


def _is_simplified(text: str, codec: str) -> bool:
    """GB 2312 level 1 (rows 16–55) and punctuation."""
    return _frequent(text, codec, lambda lead, trail: trail >= 0xA1 and _in(lead, 0xB0, 0xD7))


def _is_traditional(text: str, codec: str) -> bool:
    """Big5 level 1 and punctuation."""
    return _frequent(text, codec, lambda lead, trail: _in(lead, 0xA4, 0xC6))


def _frequent(text: str, codec: str, common: Callable[[int, int], bool]) -> bool:
    pairs = list(_pairs("".join(_NOT_ASCII.findall(text)), codec))
    if not pairs:
        return False
    good = sum(common(lead, trail) or _in(lead, 0xA1, 0xA3) for lead, trail in pairs)
    in_runs = sum(map(len, _CJK_RUN.findall(text)))
    return good >= 0.9 * len(pairs) and in_runs >= 0.5 * len(pairs)


def _in(value: int, low: int, high: int) -> bool:
    return low <= value <= high


def _pairs(text: str, codec: str) -> Iterable[tuple[int, int]]:
    data = text.encode(codec)
    return zip(data[::2], data[1::2], strict=False)


def _is_western(text: str, codec: str) -> bool:
    """Latin text with a few accents: ASCII letters dominate, and the others are Western letters."""
    letters = sum(char.isalpha() for char in text)
    accents = len(_NOT_ASCII.findall(text))
    if accents > 0.3 * letters or _share(_WESTERN, text) < 0.95:
        return False
    used = set(text)
    hungarian = used & set("õû") and used & set("öü") and used & set("áíóú")  # ő and ű in cp1250
    return not hungarian and not _NOT_WESTERN.search(text)


def _is_central(text: str, codec: str) -> bool:
    """Latin text with the accents of Polish, Czech, Slovak or Hungarian."""
    letters = sum(char.isalpha() for char in text)
    return len(_NOT_ASCII.findall(text)) <= 0.4 * letters and _share(_CENTRAL, text) >= 0.97


def _is_cyrillic(text: str, codec: str) -> bool:
    """Cyrillic words in lower case: the other Cyrillic encodings swap the cases."""
    letters = "".join(_CYRILLIC.findall(text))
    lower = sum(map(str.islower, letters))
    return _share(_CYRILLIC, text) >= 0.9 and lower >= 0.75 * len(letters) >= 0.3 * len(text)


_RULES: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("cp949", _is_korean),
    ("cp932", _is_japanese),
    ("euc_jp", _is_japanese),
    ("gbk", _is_simplified),
    ("cp950", _is_traditional),
    ("koi8_r", _is_cyrillic),
    ("cp1252", _is_western),
    ("iso8859_2", _is_central),
    ("cp1250", _is_central),
)
