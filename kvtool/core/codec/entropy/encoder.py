"""Encode streams, as fast as this machine can; what the bytes are: reference.py."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy import ir_encode, ir_symbols, native, reference
from kvtool.core.codec.entropy.columns import Columns, address
from kvtool.core.codec.entropy.ir_output import BLOCK, MOST_CONTEXT
from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE, U8, U32, Stream
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO, TableSet

_SLACK = 16  # words an encoder may write behind the last: those of a register
_MISSING = 1 << 31
_own = threading.local()
_entries: WeakKeyDictionary[TableSet, U32] = WeakKeyDictionary()


def to_symbols(numbers: npt.NDArray[np.int16], columns: Columns) -> tuple[U8, int]:
    """Symbols `[rows, columns]` of numbers `[rows, stride]`, which are where a decoder would put them.

    Returns
    -------
    The symbols, ESCAPE where a column's table does not have the number; and how many of these there are.

    Raises
    ------
    ValueError : numbers that are not int16, or too few.
    """
    if numbers.ndim != 2 or numbers.dtype != np.int16 or columns.reach > numbers.shape[1]:
        raise ValueError("numbers are int16 [rows, stride], as wide as the columns reach")
    kernel = native.kernel(native.SYMBOLS)
    symbols = np.empty((len(numbers), len(columns)), np.uint8)
    if not symbols.size:
        return symbols, 0
    low, many = columns.limits
    if kernel is None or numbers.strides[1] != numbers.itemsize:
        taken = numbers[:, columns.numbers]
        escapes = (taken - low).view(np.uint16) >= many.view(np.uint16)
        symbols[:] = np.where(escapes, np.uint8(ESCAPE), taken.astype(np.uint8) + np.uint8(ZERO))
        return symbols, int(escapes.sum())
    count = np.zeros(1, np.int64)
    values = {
        "numbers": address(numbers),
        "stride": numbers.strides[0],
        "places": address(columns.places),
        "low": address(low),
        "many": address(many),
        "symbols": address(symbols),
        "rows": len(numbers),
        "blocks": len(columns) // BLOCK,
        "escapes": address(count),
    }
    job = np.array([values[name] for name in ir_symbols.FIELDS], np.int64)
    kernel(address(job), 1)
    return symbols, int(count[0])


def encode(symbols: U8, columns: Columns, contexts: U8 | None = None) -> Stream:
    """Encode symbols `[rows, columns]`; the same bytes as reference.encode, in one piece of memory, states last.

    Parameters
    ----------
    contexts : uint8 `[rows, columns]`, at most 2, added to the column's table id; where the columns refine.

    Raises
    ------
    ValueError : a symbol whose table gives it no frequency, or arrays of the wrong shape.
    """
    _check(symbols, columns, contexts)
    kernel = native.kernel(native.ENCODE if contexts is None else native.ENCODE_CONTEXTS)
    if kernel is None or not symbols.size:
        made = reference.encode(symbols, columns.ids, columns.tables, contexts)
        return _in_one_piece(made.words, made.states)
    rows = len(symbols)
    states = np.full(LANES, LEAST_STATE, np.uint32)
    words = _words_for(symbols.size + _SLACK)
    counts = np.zeros(2, np.int64)
    bases, entries = columns.first_entries, _encoder_entries(columns.tables)
    end = symbols.size  # symbols and contexts are bytes
    at = address(counts)
    values = {
        "symbols": address(symbols) + end,
        "contexts": 0 if contexts is None else address(contexts) + end,
        "bases": address(bases),
        "entries": address(entries),
        "states": address(states),
        "words": address(words),
        "rows": rows,
        "groups": columns.groups,
        "written": at,
        "missing": at + counts.itemsize,
    }
    job = np.array([values[name] for name in ir_encode.FIELDS], np.int64)
    kernel(address(job), 1)
    if int(counts[1]) & _MISSING:
        raise ValueError("a symbol that its table does not have")
    return _in_one_piece(words[: counts[0]][::-1], states[::-1])


def _words_for(count: int) -> npt.NDArray[np.uint16]:
    """This thread's memory: asked of the system anew each time, it would take as long as the encoding."""
    held: npt.NDArray[np.uint16] | None = getattr(_own, "words", None)
    if held is None or len(held) < count:
        held = _own.words = np.empty(count, np.uint16)
    return held


def _in_one_piece(words: npt.NDArray[np.uint16], states: U32) -> Stream:
    size = 2 * len(words)
    whole = np.empty(size + states.nbytes, np.uint8)
    stream = Stream(whole[:size].view(np.uint16), whole[size:].view(np.uint32), address(whole))
    stream.words[:] = words
    stream.states[:] = states
    return stream


def _encoder_entries(tables: TableSet) -> U32:
    """What an encoder looks up, uint32 `[tables * 256]`: frequency | cumulative << 12, or that there is none."""
    entries = _entries.get(tables)
    if entries is None:
        frequencies = tables.frequencies.astype(np.uint32)
        cumulative = tables.cumulative.astype(np.uint32) << np.uint32(ir_encode.CUMULATIVE_AT)
        present = np.asarray(frequencies | cumulative, np.uint32)
        entries = np.where(frequencies == 0, np.uint32(ir_encode.MISSING), present).reshape(-1)
        _entries[tables] = entries
    return entries


def _check(symbols: U8, columns: Columns, contexts: U8 | None) -> None:
    wanted = (len(symbols), len(columns))
    if symbols.shape != wanted or symbols.dtype != np.uint8 or not symbols.flags.c_contiguous:
        raise ValueError("symbols are uint8 [rows, columns]")
    if contexts is None:
        return
    if contexts.shape != wanted or contexts.dtype != np.uint8 or not contexts.flags.c_contiguous:
        raise ValueError("contexts are uint8, one a symbol")
    if not columns.refines or (contexts.size and int(contexts.max()) > MOST_CONTEXT):
        raise ValueError("contexts up to 2, of columns that refine")
