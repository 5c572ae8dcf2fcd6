"""What the bytes are: interleaved rANS in numpy. Every faster coder must give these bytes and these symbols.

64 lanes share one stream of 16-bit words. A lane's state is a uint32 in [2^16, 2^32). Symbols `[rows, columns]` are
coded row by row, 64 columns at a time, one a lane; `columns` is a multiple of 64. A symbol's table is that of its
column, plus its context where there are contexts. Decoding one symbol, in every lane:

    entry = slots[table * 2048 + (state & 2047)]
    state = frequency(entry) * (state >> 11) + bias(entry)
    if state < 2^16: state = state << 16 | next word          (lanes take words in ascending order)

A decoder starts with the stream's states and must end with 2^16 in every lane and no word left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.tables import PROBABILITY_BITS, SLOTS, TableSet
from kvtool.core.errors import DamagedError

LANES = 64
LEAST_STATE = 1 << 16
BLOCK = 32  # columns that stay together
MOST_CONTEXT = 2  # a coarser number's size, capped

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)  # frozen, making one would take twice as long; there is one for each record
class Stream:
    """An encoded stream: `words` uint16 in the order a decoder reads them, `states` uint32 `[64]` it starts with.

    `address` : of the words, where whoever made the stream knows that the states follow them in memory; else 0.
    """

    words: U16
    states: U32
    address: int = 0


def encode(symbols: U8, ids: U16, tables: TableSet, contexts: U8 | None = None) -> Stream:
    """Encode symbols `[rows, columns]`.

    Parameters
    ----------
    ids : table of each column, uint16 `[columns]`.
    contexts : uint8 `[rows, columns]`, added to the column's table id.

    Raises
    ------
    ValueError : a symbol whose table gives it no frequency.
    """
    rows, columns = symbols.shape
    steps = rows * columns // LANES
    which = np.broadcast_to(ids.astype(np.int64), symbols.shape)
    which = which if contexts is None else which + contexts
    frequencies = tables.frequencies[which, symbols].astype(np.uint64).reshape(steps, LANES)
    cumulative = tables.cumulative[which, symbols].astype(np.uint64).reshape(steps, LANES)
    if steps and not frequencies.all():
        raise ValueError("a symbol that its table does not have")
    states = np.full(LANES, LEAST_STATE, np.uint64)
    words: list[U16] = []
    for step in range(steps - 1, -1, -1):
        frequency = frequencies[step]
        full = states >= frequency << np.uint64(32 - PROBABILITY_BITS)
        words.append(states[full].astype(np.uint16)[::-1])
        states = np.where(full, states >> np.uint64(16), states)
        states = (states // frequency << np.uint64(PROBABILITY_BITS)) + states % frequency + cumulative[step]
    backwards = np.concatenate(words) if words else np.empty(0, np.uint16)
    return Stream(np.ascontiguousarray(backwards[::-1]), states.astype(np.uint32))


def decode(stream: Stream, rows: int, ids: U16, tables: TableSet, contexts: U8 | None = None) -> U8:
    """Symbols `[rows, columns]` of a stream.

    Raises
    ------
    DamagedError : a table that does not exist, too few words, words left over, or end states that are not 2^16.
    """
    columns = len(ids)
    check_ids(ids, tables, 0 if contexts is None or not contexts.size else int(contexts.max()))
    slots, mask = tables.slots, np.uint32(SLOTS - 1)
    base = ids.astype(np.int64)
    symbols = np.empty((rows, columns), np.uint8)
    states, at = stream.states.astype(np.uint32), 0
    for row in range(rows):
        for start in range(0, columns, LANES):
            block = slice(start, start + LANES)
            table = base[block] if contexts is None else base[block] + contexts[row, block]
            entry = slots[table * SLOTS + (states & mask)]
            symbols[row, block] = entry & np.uint32(255)
            states = ((entry >> np.uint32(8)) & np.uint32(4095)) * (states >> np.uint32(PROBABILITY_BITS))
            states += entry >> np.uint32(20)
            empty = np.flatnonzero(states < LEAST_STATE)
            words = stream.words[at : at + len(empty)]
            if len(words) < len(empty):
                raise DamagedError("an encoded stream that ends too early")
            states[empty] = (states[empty] << np.uint32(16)) | words
            at += len(empty)
    check_end(states, at, len(stream.words))
    return symbols


def check_ids(ids: U16, tables: TableSet, most_context: int) -> None:
    """Refuse columns that name a table which is not there; raises DamagedError."""
    if len(ids) % LANES or (len(ids) and int(ids.max()) + most_context >= len(tables)):
        raise DamagedError("a column that names no table")


def check_end(states: U32, read: int, words: int) -> None:
    """Refuse a stream that does not end where its encoder began; raises DamagedError."""
    if read != words or (states != LEAST_STATE).any():
        raise DamagedError("an encoded stream that does not end where it should")
