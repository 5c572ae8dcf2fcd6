"""Interleaved rANS in numpy, which defines the bytes: every coder must give these bytes and these symbols."""

from __future__ import annotations

import numpy as np

from kvtool.core.codec.rans.tables import (
    LANES,
    LEAST_STATE,
    PROBABILITY_BITS,
    SLOTS,
    U8,
    U16,
    Stream,
    TableSet,
    check_ids,
)
from kvtool.core.errors import DamagedError


def encode(symbols: U8, ids: U16, tables: TableSet, contexts: U8 | None = None) -> Stream:
    """Encode symbols `[rows, columns]`.

    Parameters
    ----------
    ids : table of each column, uint16 `[columns]`.
    contexts : uint8 `[rows, columns]`, added to the column's table id.

    Raises
    ------
    ValueError : a table gives a symbol no frequency.
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
    return Stream.of(np.ascontiguousarray(backwards[::-1]), states.astype(np.uint32))


def decode(stream: Stream, rows: int, ids: U16, tables: TableSet, contexts: U8 | None = None) -> U8:
    """Decode the symbols `[rows, columns]` of a stream.

    Raises DamagedError: a table does not exist, words are missing or left over, or end states are not 2^16.
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
    if at != len(stream.words) or (states != LEAST_STATE).any():
        raise DamagedError("an encoded stream that does not end where it should")
    return symbols
