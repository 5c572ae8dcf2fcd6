"""Tables of every shape, symbols that use all of them, and what a decoder has to give."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.core.codec.rans.coder import Decoding, Encoding, encode
from kvtool.core.codec.rans.tables import (
    ALPHABET,
    ESCAPE,
    SLOTS,
    U8,
    U16,
    ZERO,
    Columns,
    Stream,
    TableSet,
    in_order,
    quantised,
)
from tests.codec.rans import reference


def _row(**frequencies: int) -> U16:
    row = np.zeros(ALPHABET, np.uint16)
    for symbol, frequency in frequencies.items():
        row[int(symbol.removeprefix("s"))] = frequency
    return row


def table_set(seed: int = 0) -> TableSet:
    """Flat, single, peaked, with an escape, of two symbols, bell-shaped from narrow to wide, and ragged."""
    random = np.random.default_rng(seed)
    away = np.abs(np.arange(ALPHABET) - float(ZERO))
    bells = [quantised(np.exp(-away / width)) for width in (0.2, 1.0, 3.0, 9.0, 50.0)]
    rows = [
        np.full(ALPHABET, SLOTS // ALPHABET, np.uint16),
        _row(s128=SLOTS),
        _row(s0=SLOTS),
        _row(s128=SLOTS - 1, s129=1),
        _row(s127=1, s128=2040, s129=6, **{f"s{ESCAPE}": 1}),
        _row(s0=1024, s255=1024),
        *bells,
        quantised(random.dirichlet(np.full(ALPHABET, 0.05))),
        quantised(random.dirichlet(np.full(ALPHABET, 1.0))),
    ]
    return TableSet(np.stack(rows))


TABLES = table_set()
# Symbols 127, 128 and 129 only: the refinements -1, 0 and 1.
TERNARY = TableSet(
    np.stack([_row(s127=a, s128=b, s129=SLOTS - a - b) for a, b in ((1, 2046), (600, 800), (1000, 1000), (1, 1))])
)


def symbols_for(tables: TableSet, which: np.ndarray[Any, Any], random: np.random.Generator) -> U8:
    often = tables.slots[which * SLOTS + random.integers(0, SLOTS, which.shape)] & 255
    any_ = np.argmax(np.where(tables.frequencies[which] > 0, random.random((*which.shape, ALPHABET)), -1), -1)
    return np.where(random.random(which.shape) < 1 / 8, any_, often).astype(np.uint8)


def sample(rows: int, columns: int, seed: int = 0, tables: TableSet = TABLES) -> tuple[U8, U16]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, len(tables), columns).astype(np.uint16)
    return symbols_for(tables, np.broadcast_to(ids.astype(np.int64), (rows, columns)), random), ids


def int16_job(stream: Stream, ids: U16, rows: int, tables: TableSet = TABLES, refines: bool = False) -> Decoding:
    """Into an array of its own, full of a number that no symbol gives."""
    out = np.full((rows, len(ids)), 999, np.int16)
    return Decoding(stream, in_order(ids, tables, refines), out)


def encoded(symbols: U8, columns: Columns, contexts: U8 | None = None) -> Stream:
    return encode(Encoding(symbols, columns, contexts))[0]


def stream_of(symbols: U8, ids: U16, tables: TableSet = TABLES) -> Stream:
    return reference.encode(symbols, ids, tables)
