"""Encode streams, as fast as this machine can; what the bytes are: reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np

from kvtool.core.codec.entropy import encode_ir, native, reference
from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE, MOST_CONTEXT, U8, U16, U32, Stream
from kvtool.core.codec.entropy.tables import TableSet
from kvtool.core.native.jit import Function
from kvtool.core.native.job import Jobs, address, scratch

_SLACK = 16  # words an encoder may write behind the last: those of a register
_MISSING = 1 << 31
_entries: WeakKeyDictionary[TableSet, tuple[U32, int]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Encoding:
    """Symbols to encode.

    Attributes
    ----------
    symbols : `[rows, columns]`.
    contexts : uint8 `[rows, columns]`, at most 2, added to the column's table id; where the columns refine.
    """

    symbols: U8
    columns: Columns
    contexts: U8 | None = None


def encode(symbols: U8, columns: Columns, contexts: U8 | None = None) -> Stream:
    """Encode symbols; the same bytes as reference.encode, in one piece of memory, states last. Raises ValueError."""
    return encode_all([Encoding(symbols, columns, contexts)])[0]


def encode_all(encodings: Sequence[Encoding]) -> list[Stream]:
    """Encode several, each as a stream of its own, in one call: the same bytes as `reference.encode` makes of each.

    Raises
    ------
    ValueError : a symbol whose table gives it no frequency, or arrays of the wrong shape; some have contexts, some not.
    """
    for one in encodings:
        _check(one.symbols, one.columns, one.contexts)
    contexts = bool(encodings) and encodings[0].contexts is not None
    if any((one.contexts is not None) != contexts for one in encodings):
        raise ValueError("all have contexts, or none has")
    kernel = native.kernel(native.ENCODE_CONTEXTS if contexts else native.ENCODE)
    if kernel is None:
        return [_in_numpy(one) for one in encodings]
    made = iter(_run(kernel, [one for one in encodings if one.symbols.size]))
    return [next(made) if one.symbols.size else _in_numpy(one) for one in encodings]


def _in_numpy(one: Encoding) -> Stream:
    made = reference.encode(one.symbols, one.columns.ids, one.columns.tables, one.contexts)
    return _in_one_piece(made.words, made.states)


def _run(kernel: Function, encodings: Sequence[Encoding]) -> list[Stream]:
    if not encodings:
        return []
    sizes = [one.symbols.size for one in encodings]  # symbols and contexts are bytes
    ends = list(accumulate(size + _SLACK for size in sizes))
    words = scratch("words", ends[-1], np.uint16)
    starts = [end - size - _SLACK for end, size in zip(ends, sizes, strict=True)]
    states = np.full((len(encodings), LANES), LEAST_STATE, np.uint32)
    counts = np.zeros((len(encodings), 2), np.int64)
    held = [(one.columns.held, *_encoder_entries(one.columns.tables)) for one in encodings]
    at = address(counts) + np.arange(len(encodings)) * counts.strides[0]
    jobs = Jobs(encode_ir.ENCODE, len(encodings))
    jobs.set(
        symbols=[address(one.symbols) + size for one, size in zip(encodings, sizes, strict=True)],
        contexts=[
            0 if one.contexts is None else address(one.contexts) + size
            for one, size in zip(encodings, sizes, strict=True)
        ],
        bases=[of.first_entries for of, _, _ in held],
        entries=[place for _, _, place in held],
        states=address(states) + np.arange(len(encodings)) * states.strides[0],
        words=address(words) + np.array(starts) * words.itemsize,
        rows=[len(one.symbols) for one in encodings],
        groups=[one.columns.groups for one in encodings],
        written=at,
        missing=at + counts.itemsize,
    )
    jobs.run(kernel)
    if (counts[:, 1] & _MISSING).any():
        raise ValueError("a symbol that its table does not have")
    return [
        _in_one_piece(words[start : start + count][::-1], own)
        for start, count, own in zip(starts, counts[:, 0].tolist(), states[:, ::-1].copy(), strict=True)
    ]


def _in_one_piece(words: U16, states: U32) -> Stream:
    size = len(words)
    whole = np.empty(size + 2 * len(states), np.uint16)
    whole[:size] = words
    whole[size:] = states.view(np.uint16)
    return Stream(whole[:size], whole[size:].view(np.uint32), address(whole))


def _encoder_entries(tables: TableSet) -> tuple[U32, int]:
    """What an encoder looks up, uint32 `[tables * 256]`: frequency | cumulative << 12, or that there is none; where."""
    entries = _entries.get(tables)
    if entries is None:
        frequencies = tables.frequencies.astype(np.uint32)
        cumulative = tables.cumulative.astype(np.uint32) << np.uint32(encode_ir.CUMULATIVE_AT)
        present = np.asarray(frequencies | cumulative, np.uint32)
        looked_up = np.where(frequencies == 0, np.uint32(encode_ir.MISSING), present).reshape(-1)
        entries = _entries[tables] = looked_up, address(looked_up)
    return entries


def _check(symbols: U8, columns: Columns, contexts: U8 | None) -> None:
    wanted = (len(symbols), columns.ids.shape[0])
    if symbols.shape != wanted or symbols.dtype != np.uint8 or not symbols.flags.c_contiguous:
        raise ValueError("symbols are uint8 [rows, columns]")
    if contexts is None:
        return
    if contexts.shape != wanted or contexts.dtype != np.uint8 or not contexts.flags.c_contiguous:
        raise ValueError("contexts are uint8, one a symbol")
    if not columns.refines or (contexts.size and int(contexts.max()) > MOST_CONTEXT):
        raise ValueError("contexts up to 2, of columns that refine")
