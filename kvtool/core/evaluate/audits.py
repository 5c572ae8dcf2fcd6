"""Audits: given answers compared with full prefill afterwards, and their journal next to the store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side_files import append_side, read_side_log
from kvtool.core.evaluate.measures import run_name

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

_FORMAT = 1  # of a line
_SHORT = 160  # characters of a question that are kept
_DRAWN_OF = 2**64
_LATEST = 253_402_300_800  # seconds since 1970 that no calendar names any more


@dataclass(frozen=True, slots=True)
class Audit:
    """Comparison of a fused answer with full prefill's answer over the same prompt.

    Attributes
    ----------
    at : time of the audit, in seconds since 1970.
    question : its first characters, on one line. `revision`: of the store.
    fusion, amount, changes : the mode, how much it recomputes by its own knob (None: it has none), and its other
        parameters if they are not the mode's own.
    levels : at which chunks were read, finest first. `lead_in`: the store's, by its mode.
    tokens : of the prompt: `prompt`, `reused`, `recomputed`, `fresh`; and `script`, the tokens that were compared.
    holes : chunks that were computed in place: the more, the less the audit says about reuse.
    sampled : the answer was drawn at a temperature; `answer_equal` then compares its greedy answer.
    kl_first, kl_answer, top1_agrees : as in `inspect quality`, over full prefill's own greedy answer.
    answer_equal : whether the whole answer is full prefill's.
    milliseconds : duration of the audit.
    """

    at: int
    question: str
    revision: int
    fusion: str
    amount: float | None
    changes: Mapping[str, Any]
    levels: Sequence[str]
    lead_in: str
    tokens: Mapping[str, int]
    holes: int
    sampled: bool
    kl_first: float
    kl_answer: float
    top1_agrees: bool
    answer_equal: bool
    milliseconds: float

    @property
    def run(self) -> str:
        """Return the mode with its other parameters and its amount, such as `union+shift=no:0.15`."""
        return run_name(self.fusion, self.changes.items(), self.amount)

    def to_json(self) -> dict[str, Any]:
        """Return a line of the journal."""
        return {"format": _FORMAT} | {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Audit:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError, ValueError or OverflowError where it is no audit."""
        if row["format"] != _FORMAT:
            raise ValueError(f"format {row['format']!r}")
        audit = cls(**{name: row[name] for name in cls.__slots__})
        texts = (audit.question, audit.fusion, audit.lead_in, *audit.levels)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("no text")
        if not all(map(math.isfinite, audit._numbers())) or not 0 <= audit.at < _LATEST:
            raise ValueError("no such number")
        return audit

    def _numbers(self) -> tuple[float, ...]:
        """Return all that has to be a number. Raises KeyError: how much was recomputed is missing."""
        distances = (self.kl_first, self.kl_answer, self.top1_agrees, self.answer_equal)
        shares = (self.tokens["reused"], self.tokens["recomputed"], self.amount or 0)
        return (*distances, *shares, self.holes, self.sampled, self.milliseconds)


@dataclass(frozen=True, slots=True)
class Kept:
    """The journal of a store for one model: audits, oldest first, and the number of unreadable lines."""

    audits: tuple[Audit, ...]
    damaged: int


def is_drawn(question: str, revision: int, share: float) -> bool:
    """Return True if a question is among the `share` (0 … 1) that is audited.

    It follows from its words and the store's revision only: the same question is drawn again, in any mode or process.
    """
    digest = hashlib.blake2b(f"{revision}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * _DRAWN_OF


def shortened(question: str) -> str:
    """Return the beginning of a question, on one line."""
    words = " ".join(question.split())
    return words if len(words) <= _SHORT else f"{words[: _SHORT - 1]}…"


def keep_audit(store: Store, fingerprint: str, audit: Audit) -> bool:
    """Append an audit to the store's journal of this model; False: it cannot be kept (see `append_side`)."""
    return append_side(store, _name(fingerprint), audit.to_json())


def kept_audits(store: Store, fingerprint: str) -> Kept:
    """Read the journal of a model."""
    log = read_side_log(store, _name(fingerprint))
    audits, damaged = [], log.damaged
    for row in log.values:
        try:
            audits.append(Audit.from_json(row))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            damaged += 1
    return Kept(tuple(audits), damaged)


def _name(fingerprint: str) -> str:
    return f"audit/{fingerprint[:16]}.jsonl"
