"""Measures of an answer, and audits: given answers compared with full prefill, kept next to the store."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.text import normalised
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


SCORES = ("f1", "exact_match", "contains")  # against gold answers; `scoring`
DISTANCES = ("kl_first", "kl_answer", "top1_agrees", "answer_equal")  # from a reference's answer; `reference`
MEASURES = (*SCORES, *DISTANCES)

Row = Mapping[str, Any]


def numbers_of(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]


def means(rows: Sequence[Row], names: Iterable[str] = MEASURES) -> dict[str, float]:
    return {name: statistics.fmean(numbers) for name in names if (numbers := numbers_of(rows, name))}


def medians(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    return {name: statistics.median(numbers) for name in names if (numbers := numbers_of(rows, name))}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


def normalise(text: str) -> str:
    """Reduce a text to lower case without punctuation, articles and double spaces (SQuAD 1.1 evaluation)."""
    text = normalised("NFC", text).lower()
    text = "".join(char for char in text if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def score(answer: str, gold: Iterable[str]) -> dict[str, float]:
    """Return the SCORES of an answer against the gold ones, of each the best."""
    said = normalise(answer)
    wanted = [normalise(text) for text in gold]
    return {
        "f1": max((_f1(said, text) for text in wanted), default=0.0),
        "exact_match": float(said in wanted),
        "contains": float(any(text and text in said for text in wanted)),
    }


def _f1(said: str, wanted: str) -> float:
    a, b = said.split(), wanted.split()
    common = sum((Counter(a) & Counter(b)).values())
    if not a or not b:
        return float(a == b)
    return 2 * common / (len(a) + len(b))


def run_name(mode: str, changes: Iterable[tuple[str, Any]], amount: float | None) -> str:
    variant = "+".join([mode, *(f"{name}={_text(value)}" for name, value in changes)])
    return variant if amount is None else f"{variant}:{amount:.12g}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


_FILE = "audit/audits.sqlite"
_MOST = 4096  # audits that are kept, about 2 MiB
_LOCK_SECONDS = 15.0
_SHORT = 160  # characters of a question that are kept
_DRAWN_OF = 2**64


@dataclass(frozen=True, slots=True)
class Audit:
    at: int  # time of the audit, in seconds since 1970
    question: str  # its first characters, on one line
    revision: int  # of the store
    fusion: str
    amount: float | None  # how much the mode recomputes, by its own knob; None: it has none
    changes: Mapping[str, Any]
    levels: Sequence[str]  # at which chunks were read, finest first
    lead_in: str  # the store's, by its mode
    tokens: Mapping[str, int]  # `prompt`, `reused`, `recomputed`, `fresh`; and `script`, those that were compared
    holes: int  # chunks that were computed in place: the more, the less the audit says about reuse
    sampled: bool  # the answer was drawn at a temperature; `answer_equal` then compares its greedy answer
    kl_first: float  # as in `eval`, over full prefill's own greedy answer
    kl_answer: float
    top1_agrees: bool
    answer_equal: bool  # whether the whole answer is full prefill's
    milliseconds: float  # duration of the audit

    @property
    def run(self) -> str:
        return run_name(self.fusion, self.changes.items(), self.amount)


def is_drawn(question: str, revision: int, share: float) -> bool:
    """True if a question is among the audited `share` (0 … 1), by its words and the store's revision only."""
    digest = hashlib.blake2b(f"{revision}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * _DRAWN_OF


def shortened(question: str) -> str:
    words = " ".join(question.split())
    return words if len(words) <= _SHORT else f"{words[: _SHORT - 1]}…"


def keep_audit(store: Store, fingerprint: str, audit: Audit) -> bool:
    """Keep an audit, and drop the oldest if there are too many; False: the store cannot be written for now."""
    if store.read_only:
        return False
    path = store.side_file(_FILE)
    try:
        with _opened(path, "rwc") as database:
            path.chmod(0o600)
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE IF NOT EXISTS audits (number INTEGER PRIMARY KEY, model TEXT, audit TEXT)")
            row = fingerprint, json.dumps(asdict(audit))
            number = database.execute("INSERT INTO audits (model, audit) VALUES (?, ?)", row).lastrowid or 0
            database.execute("DELETE FROM audits WHERE number <= ?", (number - _MOST,))
    except OSError:
        return False
    return True


def kept_audits(store: Store, fingerprint: str) -> tuple[Audit, ...]:
    path = store.side_file(_FILE)
    if not path.exists():
        return ()
    try:
        with _opened(path, "ro") as database:
            rows = database.execute("SELECT audit FROM audits WHERE model = ? ORDER BY number", (fingerprint,))
            return tuple(Audit(**json.loads(text)) for (text,) in rows)
    except (OSError, ValueError, TypeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}", "delete it; new audits are kept in a new one") from error


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[Any]:
    """Open the database for one transaction. Raises OSError for every failure."""
    import sqlite3  # not with the measures of each question

    try:
        where = f"{path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(where, _LOCK_SECONDS, uri=True)) as database, database:
            yield database
    except sqlite3.Error as error:
        raise OSError(str(error)) from error
