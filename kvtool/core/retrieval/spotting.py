"""Spot stored chunks in the token ids of a prompt. The text next to a pasted chunk changes the tokens at its ends, and
clients cut, quote or escape it. So the index holds short runs of each chunk, its *anchors*; from one of them a match is
extended in both directions. Every matched id is compared: equal hashes cost time and nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvtool.core.cache.identity import ID_BYTES

WIDTH = 12  # tokens of an anchor
SEAM = 8  # tokens at either end of a chunk that often change with the text next to it
FEWEST = 24  # tokens; a shorter run is computed as quickly as it is read
_ANCHORS = 3
_COPIES = 16  # anchors compared at one place of a prompt; further chunks of the same text add nothing
_COMPARED = 64  # tokens for each one of a prompt; of a text that repeats itself, each place matches many others
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, and its bits look random: 2^64 by the golden ratio
_BYTE, _IN_BYTE = np.uint64(3), np.uint64(7)

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` … `stop` of a prompt are those of a chunk from its token `skipped` on."""

    chunk_id: bytes
    start: int
    stop: int
    skipped: int

    def __len__(self) -> int:
        return self.stop - self.start


class Spotter:
    """An index of chunks by token ids, of at most 60 bytes a chunk; the next update reads `unread` chunks again."""

    def __init__(self, read: Callable[[bytes], Sequence[int] | Tokens], anchors: int = _ANCHORS) -> None:
        self._read, self._anchors = read, anchors
        self._ids = b""  # of all chunks, one after another
        self._hashes = np.empty(0, np.uint64)  # of their anchors, ascending
        self._entries = np.empty(0, np.uint32)  # a chunk's number times `anchors`, and its anchor's
        self.unread = 0
        self._shift, self._filter = np.uint64(0), np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return len(self._ids) + self._hashes.nbytes + self._entries.nbytes + self._filter.nbytes

    def update(self, chunk_ids: Iterable[bytes]) -> None:
        wanted, held = set(chunk_ids), [self._id(number) for number in range(len(self._ids) // ID_BYTES)]
        stays = np.array([chunk_id in wanted for chunk_id in held], bool)
        lacking, new, kept = sorted(wanted.difference(held)), list[bytes](), int(stays.sum())
        windows, entries = list[Sequence[int] | Tokens](), list[int]()
        for chunk_id in lacking:
            ids = self._read(chunk_id)
            for which, at in enumerate(_anchors(len(ids), self._anchors)):
                windows.append(ids[at : at + WIDTH])
                entries.append((kept + len(new)) * self._anchors + which)
            new += [chunk_id] if len(ids) else []
        self.unread = len(lacking) - len(new)
        new_windows = np.fromiter(chain.from_iterable(windows), np.uint32).reshape(-1, WIDTH)
        most = np.uint32(self._anchors)
        numbers, which_of = np.divmod(self._entries, most)
        keep = stays[numbers]
        moved = (stays.cumsum(dtype=np.uint32) - np.uint32(1))[numbers[keep]] * most + which_of[keep]
        hashes = np.concatenate((self._hashes[keep], _hashes(new_windows.T)))
        order = np.argsort(hashes)
        self._hashes = hashes[order]
        self._entries = np.concatenate((moved, np.array(entries, np.uint32)))[order]
        bits = max(3, 2 + (len(hashes) - 1).bit_length())  # 4 to 8 for each hash
        self._shift = np.uint64(64 - bits)
        known = np.zeros(1 << bits, bool)
        known[hashes >> self._shift] = True
        self._filter = np.packbits(known, bitorder="little")
        self._ids = b"".join(chain((chunk_id for chunk_id, stay in zip(held, stays, strict=True) if stay), new))

    def spot(self, ids: Sequence[int]) -> list[Span]:
        prompt = np.asarray(ids, np.uint32)
        read = dict[bytes, Tokens]()
        reached = dict[tuple[bytes, int], int]()  # by chunk and where its first token would be: the last match's end
        spans, left, end = list[Span](), _COMPARED * len(prompt), 0  # tokens to compare; end of what is matched
        for place, entry in self._places(prompt):
            if left <= 0 and place + WIDTH <= end:
                continue  # only what extends a match is compared from now on
            chunk_id, which = self._id(entry // self._anchors), entry % self._anchors
            if chunk_id not in read:
                read[chunk_id] = np.asarray(self._read(chunk_id), np.uint32)
            own = read[chunk_id]
            anchors = _anchors(len(own), self._anchors)
            if which < len(anchors) and reached.get((chunk_id, place - (at := anchors[which])), 0) <= place:
                span = _extended(prompt, place, chunk_id, own, at, end if left <= 0 else 0)
                reached[chunk_id, place - at] = span.stop
                spans.append(span)
                left, end = left - len(span) - 1, max(end, span.stop)
        return without_overlap(spans)

    def _id(self, number: int) -> bytes:
        return self._ids[number * ID_BYTES : (number + 1) * ID_BYTES]

    def _places(self, prompt: Tokens) -> Iterator[tuple[int, int]]:
        if len(prompt) < WIDTH or not len(self._hashes):
            return
        hashes = _hashes(np.lib.stride_tricks.sliding_window_view(prompt, WIDTH).T)
        bits = hashes >> self._shift
        known = self._filter[bits >> _BYTE] >> (bits & _IN_BYTE).astype(np.uint8) & np.uint8(1)
        places = np.flatnonzero(known)  # most windows of other text end here
        places = places[np.argsort(hashes[places])]  # so that each search is near the last one
        firsts = np.searchsorted(self._hashes, hashes[places])
        found = self._hashes[np.minimum(firsts, len(self._hashes) - 1)] == hashes[places]
        places, firsts = places[found], firsts[found]
        lasts = np.minimum(np.searchsorted(self._hashes, hashes[places], side="right"), firsts + _COPIES)
        for place, first, last in sorted(zip(places.tolist(), firsts.tolist(), lasts.tolist(), strict=True)):
            for entry in self._entries[first:last].tolist():
                yield place, entry


def _anchors(tokens: int, most: int) -> list[int]:
    """Where the anchors of a chunk begin: after the first seam, before the last one, and between them."""
    last = tokens - WIDTH - SEAM
    if last < SEAM:
        return [(tokens - WIDTH) // 2] if tokens >= FEWEST else []
    count = min(most, 1 + (last - SEAM) // FEWEST)
    return [SEAM + (last - SEAM) * which // max(1, count - 1) for which in range(count)]


def _hashes(columns: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Hash each window, uint64 `[windows]`; `columns`: uint32 `[WIDTH, windows]`."""
    hashes = np.zeros(columns.shape[1], np.uint64)
    for column in columns:
        hashes = (hashes ^ column) * _FACTOR
        hashes ^= hashes >> np.uint64(32)
    return hashes


def _extended(prompt: Tokens, place: int, chunk_id: bytes, own: Tokens, at: int, first: int) -> Span:
    """Extend a match to both sides, no further back than `first`; an empty span where nothing matches."""
    ahead = _common(prompt[place:], own[at:])
    if ahead < WIDTH:
        return Span(chunk_id, place, place, at)
    behind = _common(prompt[first:place][::-1], own[:at][::-1])
    return Span(chunk_id, place - behind, place + ahead, at - behind)


def _common(one: Tokens, other: Tokens) -> int:
    length, done, step = min(len(one), len(other)), 0, 256
    while done < length:
        stop = min(done + step, length)
        differs = one[done:stop] != other[done:stop]
        if differs.any():
            return done + int(differs.argmax())
        done, step = stop, 2 * step
    return length


def without_overlap(spans: Iterable[Span]) -> list[Span]:
    taken, starts = list[Span](), list[int]()  # in the prompt's order
    for span in sorted(spans, key=lambda span: (-len(span), span.start)):
        start, stop = span.start, span.stop
        at = bisect_right(starts, start)
        if at:
            start = max(start, taken[at - 1].stop)
        while at < len(taken) and starts[at] == start < stop:
            start, at = taken[at].stop, at + 1
        stop = min(stop, starts[at]) if at < len(taken) else stop
        if stop - start >= FEWEST:
            taken.insert(at, Span(span.chunk_id, start, stop, span.skipped + start - span.start))
            starts.insert(at, start)
    return taken
