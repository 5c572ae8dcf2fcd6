"""Text → search terms, for any script: stems (Snowball) without accents, compounds split and whole. A document is
stemmed in its language; a question is too short to show one, so its words are looked up in all languages of the
index."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from functools import _lru_cache_wrapper, cache, lru_cache
from threading import Lock
from typing import TypeVar

import Stemmer

from kvtool.core.common.text import normalised

STEMS = f"snowball {Stemmer.version()}"  # other versions have other stems
ENGLISH, VIETNAMESE = "english", "vietnamese"
_STOPWORDS = (
    "a an and are as at be been by did do does for from had has have he her him his how i in into is it its many much "
    "not of on or she that the their them they this to was we were what when where which who whom whose why will with "
    "you"
).split()
# Words that show the language of a text in Latin script, whose stemmer is then used: English if it has none of them.
_COMMON = {
    ENGLISH: _STOPWORDS,
    "german": "der die das und ist nicht ein eine mit von zu den dem im auf".split(),
    "french": "le la les et est une des du dans que pour qui il en au".split(),
    "spanish": "el la es una del que por con en se su al lo".split(),
    "italian": "il di che è una per non del della gli sono con nel".split(),
    "portuguese": "os é uma da do dos que para não em com por mais".split(),
    "dutch": "de het een en van niet op te dat met voor zijn".split(),
    "swedish": "och att det är som en ett för inte av på den till".split(),
    "danish": "og det er en et ikke til af som på den der".split(),
    "norwegian": "og det er en et ikke til av som på den å".split(),
    "finnish": "ja ei että se oli ovat hän mutta joka kun".split(),
    "hungarian": "az és hogy nem egy volt ez meg csak".split(),
    "polish": "nie na się jest że jak od dla przez oraz".split(),
    "czech": "je na se že jsou jsem jako byl pro".split(),
    "romanian": "și în de la nu cu este pe din care să".split(),
    "turkish": "ve bir bu için ile da de olarak olan çok".split(),
    "catalan": "el la els les és una del que per amb en dels".split(),
    "indonesian": "yang dan di ini itu dengan untuk dari tidak adalah".split(),
    VIETNAMESE: "và của là có được trong cho các một không những với để đã".split(),
}
LANGUAGES = tuple(_COMMON)
# Words that no question is about: a person who writes nothing else greets or thanks, and asks nothing of documents.
_IDLE = frozenset(
    _STOPWORDS
    + (
        "hi hello hey hiya howdy greetings welcome bye goodbye thanks thank thx cheers please sorry ok okay yes yeah "
        "yep no nope good great fine today everyone everybody "
        "hallo bonjour salut hola ciao merci danke gracias "
        "me my myself your yours yourself we our ours them theirs these those there here hers mine "
        "am being doing done having can could shall should would might must let get got go going "
        "tell ask say said know want need like help see think make lot "
        "but if so because until while about between into through during before after up down out off over under again "
        "then than once too very just also only nor all any both each few more most other some such own same now "
        "s t d m re ve ll doesn didn isn aren wasn weren hasn hadn wouldn couldn shouldn"
    ).split()
)
_WISHES = re.compile(r"\b(?:good|nice) (?:morning|afternoon|evening|night|day)\b", re.IGNORECASE)
_SPEAKERS = {word: [one for one in LANGUAGES if word in _COMMON[one]] for words in _COMMON.values() for word in words}
_TELLING = 8000  # characters of a text that decide its language
_LEAST = 1 / 25  # share of the words that have to be common ones; Turkish has fewest
# Words of these scripts are stemmed alike in all languages; None: there is no stemmer.
_SCRIPTS = (
    ("\u0370-\u03ff\u1f00-\u1fff", "greek"),
    ("\u0400-\u052f", "russian"),
    ("\u0530-\u058f", "armenian"),
    ("\u0600-\u077f", "arabic"),
    ("\u0900-\u097f", "hindi"),
    ("\u0b80-\u0bff", "tamil"),
    ("\u0590-\u05ff\u0700-\u08ff\u0980-\u0b7f\u0c00-\u1dff\u2000-\U0010ffff", None),
)
_SCRIPT = re.compile("|".join(f"([{letters}])" for letters, _ in _SCRIPTS))

# Hangul, Kana and Han are written without (useful) spaces: Korean particles stick to their nouns; Chinese, Japanese,
# Thai, Lao, Burmese and Khmer have no word breaks. Overlapping character pairs find them all without a dictionary.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]+"
)
# Vowels of Indic scripts and accents are no letters to Python's `\w`.
_MARKS = "".join(
    mark for mark in map(chr, [*range(0x300, 0x3100), *range(0xA66F, 0xAC00)]) if unicodedata.category(mark)[0] == "M"
)
_LETTERS = rf"[\w{_MARKS}]+"
_WORD = re.compile(rf"({_LETTERS}(?:[-\u2010]{_LETTERS})*)(?:['’][sS]\b)?")
_BETWEEN_PARTS = re.compile(r"[-_\u2010]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_UNSEEN = re.compile("[\u00ad\u200c\u200d]")  # a soft hyphen, and what joins or separates letters
# A number: digits in groups (1,234,567 · 1.234.567 · 1'234 · 12 345 · 9,87,654), or plain, and decimals after another
# sign than the groups'. A longer row of numbers and signs is a date, a version, an address or a list.
_NUMBER = re.compile(
    r"[0-9](?<![A-Za-z0-9_].)(?<![0-9][.,'’].)"
    r"(?:(?<!0)(?:[0-9]{0,2}([.,'’_ ])[0-9]{3}(?:\1[0-9]{3})*|[0-9]?(?:,[0-9]{2})+,[0-9]{3})|[0-9]*)"
    r"(?:(?!\1)[.,]([0-9]+))?(?![0-9]|[.,'’][0-9])"
)
_LONGEST_KEPT = 64  # letters of a word whose terms are kept: longer ones would fill the memory
_SHORTEST, _LONGEST_TYPED = 5, 32  # letters of a word that may have a typo: shorter ones are too near to others
_NO_TYPO = re.compile(rf"\d|{_UNSPACED.pattern}")
_ENDING = 3  # letters after a stem at most, for which another stem may have them, too
T = TypeVar("T")


def language_of(text: str) -> str:
    words = re.findall(r"\w+", text[:_TELLING].casefold())
    spoken = Counter(language for word in words for language in _SPEAKERS.get(word, ()))
    best = max(LANGUAGES, key=lambda language: spoken[language])  # of equals the first
    return best if spoken[best] >= _LEAST * len(words) else ENGLISH


def terms(text: str, language: str = ENGLISH, spelled: set[str] | None = None) -> tuple[list[str], list[str]]:
    """Search terms of a text: of its words, compounds split, and of the compounds as wholes. A number's digits are
    split at its signs; its value is the whole. `spelled` collects the words."""
    text = _cleaned(text)
    words = _WORD.findall(text)
    if spelled is not None:
        spelled.update(words)
    found = _of_each_word(words, _split, language)
    wholes = [term for _, whole in found for term in whole]
    return [term for parts, _ in found for term in parts], wholes + [value for value, _ in _numbers(text)]


def asked_terms(text: str, languages: tuple[str, ...] = (ENGLISH,)) -> list[tuple[str, ...]]:
    """The words of a question, each as all terms by which a document may have it. A number's value follows, more often
    than it has parts: other numbers have those, too."""
    text = _cleaned(text)
    words = [forms for word in _of_each_word(_WORD.findall(text), _asked, languages) for forms in word]
    return words + [(value,) for value, parts in _numbers(text) for _ in range(parts + 1)]


def without_idle(text: str) -> str:
    return _WORD.sub(lambda word: " " if word[1].casefold() in _IDLE else word[0], _cleaned(_WISHES.sub(" ", text)))


def words_in(text: str) -> list[str]:
    found: list[str] = _WORD.findall(_cleaned(text))
    return found


def typed_words(words: Iterable[str]) -> list[str]:
    """The parts of words that may have a typo. Words of unspaced scripts are found by their other pairs."""
    words = [word for word in words if len(word) <= _LONGEST_TYPED and not _NO_TYPO.search(word)]
    return [part for word in words for part in _BETWEEN_PARTS.split(word) if len(part) >= _SHORTEST]


def folded(word: str) -> str:
    return word.casefold().translate(_FOLDED)


def near_words(word: str, languages: tuple[str, ...]) -> dict[str, str]:
    """Words that one typo makes into `word`, none for one that no question is about. Stems get its ending."""
    word, near = word.casefold(), dict[str, str]()
    stems = {stem for forms in _asked(word, languages) for stem in forms if len(stem) >= _SHORTEST}
    roots = {stem: end for stem in sorted(stems) if len(end := folded(word).removeprefix(stem)) <= _ENDING}
    for root, end in (roots | {word: ""}).items():
        blocks = sorted({ord(letter) & ~127 for letter in root})[:2]  # of 128 letters: a script has one or two
        letters = {chr(start + at).casefold() for start in blocks for at in range(128) if chr(start + at).isalpha()}
        halves = [(root[:at], root[at:]) for at in range(len(root) + 1)]
        near |= {head + letter + rest: "" for head, tail in halves for letter in letters for rest in (tail, tail[1:])}
        near |= {head + rest: "" for head, tail in halves for rest in (tail[1:], tail[1::-1] + tail[2:])}
        near = {each: shown or each + end for each, shown in near.items()}
    return {} if any(each[0] == word[0] for each in near.keys() & _IDLE) else near


def spellings(text: str, language: str = ENGLISH) -> dict[str, str]:
    words: dict[str, str] = {}
    for word in words_in(text):
        for term in itertools.chain(*_split(word, language)):
            words.setdefault(term, word)
    return words


def _cleaned(text: str) -> str:
    return _UNSEEN.sub("", normalised("NFKC", text))


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    """Yield the value of each number with groups or decimals, as `1234.5`, and the number of its parts."""
    for number in _NUMBER.finditer(text):
        parts = re.split("[^0-9]", number[0])
        whole = "".join(parts[:-1] if number[2] else parts)
        if len(parts) > 1:
            yield f"{whole}.{number[2] or ''}".rstrip("0").rstrip("."), len(parts)


def _of_each_word(words: list[str], find: _lru_cache_wrapper[T], language: Hashable) -> list[T]:
    return [find(word, language) if len(word) <= _LONGEST_KEPT else find.__wrapped__(word, language) for word in words]


@lru_cache(maxsize=1 << 17)
def _asked(word: str, languages: tuple[str, ...]) -> list[tuple[str, ...]]:
    each = [_split.__wrapped__(word, language) for language in languages]
    wholes = [term for _, whole in each for term in whole]
    return [tuple(dict.fromkeys([*stems, *wholes])) for stems in zip(*(parts for parts, _ in each), strict=True)]


@lru_cache(maxsize=1 << 17)
def _split(word: str, language: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The terms of a word or of a compound's parts, and that of the whole, unless it has a part of an unspaced
    script."""
    parts = [part for part in _BETWEEN_PARTS.split(word) if part]
    split = tuple(term for part in parts for term in _of_part(part.casefold(), language))
    joined = "".join(parts)
    if len(parts) < 2 or len(joined) > _LONGEST_KEPT or joined.isdecimal() or _UNSPACED.search(joined):
        return split, ()
    whole = tuple(_plain(joined.casefold(), language))
    return (split, whole) if split else (whole, ())


def _of_part(part: str, language: str) -> Iterator[str]:
    at = 0
    for run in _UNSPACED.finditer(part):
        yield from _plain(part[at : run.start()], language)
        letters, at = run[0], run.end()
        yield from (letters[first : first + 2] for first in range(max(1, len(letters) - 1)))
    yield from _plain(part[at:], language)


def _plain(word: str, language: str) -> list[str]:
    folded = word.translate(_FOLDED)  # of a lone accent nothing is left, in any language
    if not folded or ENGLISH in _SPEAKERS.get(word, ()):
        return []
    script = None if word.isascii() else _SCRIPT.search(word)
    stemmer = language if script is None else _SCRIPTS[(script.lastindex or 0) - 1][1]
    if stemmer == VIETNAMESE:  # has no endings, and its accents make other words, which no folded word may meet
        return [word if word.isdecimal() else f"vi:{word}"]
    if stemmer == ENGLISH:  # its stemmer knows no accents, those of other languages need them
        word = folded
    return [_stem(word, stemmer).translate(_FOLDED) or folded]


class _Folded(dict[int, str]):
    """Letters without accents, in Latin and Greek script. In Cyrillic й and ї are letters, in Indic scripts marks are
    vowels. Hangul stays composed."""

    def __missing__(self, code: int) -> str:
        base = unicodedata.normalize("NFD", chr(code))[0]
        self[code] = base if base.isascii() or "\u0370" <= base <= "\u03ff" else chr(code)
        return self[code]


_FOLDED = _Folded(dict.fromkeys(range(0x300, 0x370), ""))  # those that do not compose, such as stress in Cyrillic
_FOLDED |= {ord(letter): plain for letter, plain in zip("øđłıðþæœё", "o d l i d th ae oe е".split(), strict=True)}
_lock = Lock()


def _stem(word: str, language: str | None) -> str:
    if language is None or not 0 < len(word) <= _LONGEST_KEPT:
        return word
    with _lock:  # a stemmer has a state
        stem: str = _stemmer(language).stemWord(word)
    return stem or word


@cache
def _stemmer(language: str) -> Stemmer.Stemmer:
    return Stemmer.Stemmer(language, 0)
