"""rANS decoders in LLVM IR: one module for each instruction set and form of output (the bytes: reference.py).

A kernel checks only its own reading. At every step it reads at most 64 words from no later than the end of the words,
so the 128 bytes after them must be readable. It counts the words that a stream asks for, which the caller compares with
theirs; and it compares the states that are left with those that an encoder begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.codec.rans.reference import (
    BLOCK,
    ESCAPE,
    LANES,
    LEAST_STATE,
    MOST_CONTEXT,
    PROBABILITY_BITS,
    SLOTS,
    ZERO,
)
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, module, narrow
from kvtool.core.native.isa import AVX512, Isa
from kvtool.core.native.job import JOBS, Job
from kvtool.core.native.simd import any_bits, bits_of, count_bits, each_bit, permutations, permuted

FORMS = ("int16", "bfloat16", "float16")  # of the numbers as they are; the latter two have those of 8 bits exactly
REFINE = "refine"
DECODE = Job(
    words="i16*",
    count="i64",  # of words
    states="i32*",  # [64]
    bases="i32*",  # [columns]: first slot of the column's table
    slots="i32*",  # [tables * 2048]
    places="i32*",  # [columns / 32]
    out="i16*",
    stride="i64",  # bytes from row to row of `out`
    rows="i64",  # at least 1
    groups="i64",  # columns / 64, at least 1
    marked="i16*",  # [last + 1]: what takes the escapes' places, one after another; not of `refine`
    last="i64",
    replace="i64",  # all bits where escapes are replaced, else 0
    escapes="i64*",  # how many were
    read="i64*",  # words the stream asked for; their complement: its states do not end right
)


@dataclass(frozen=True, slots=True)
class Decode:
    """The kernel for a form of output, or for `refine`."""

    form: str

    def __call__(self, isa: Isa) -> str:
        """Return LLVM IR, for an instruction set."""
        k = FunctionBuilder("run", isa, JOBS)
        _decode(k, self.form)
        return module(k, constants="" if isa is AVX512 else permutations("expand", _expansions()))


def _decode(k: FunctionBuilder, form: str) -> None:
    """Keep 64 lanes in registers. A step's lookups come before its words, which depend on one another."""
    width, zero = k.width, k.constant("i64")
    memory = [k.alloca(f"<{width} x i32>").of("i32") for _ in range(LANES // width)]
    with DECODE.each(k) as job:
        starts = [job.states.load(lane, width, align=1) for lane in range(0, LANES, width)]
        rows = k.loop(job.rows, job.out, zero, zero, *starts)
        row, *carried = rows.values
        steps = k.loop(job.groups, *carried)
        position, escapes, *states = steps.values

        column, block = steps.index << 6, steps.index << 1
        outs = [row.at(job.places.load(block + half).to("i64")) for half in range(2)]
        parts = [outs[lane // BLOCK].at(lane % BLOCK) for lane in range(0, LANES, width)]
        firsts = [job.bases.at(column).load(lane, width) for lane in range(0, LANES, width)]
        coarse = [part.load(0, width).to("i32", signed=True) for part in parts] if form == REFINE else []
        if coarse:
            firsts = [_with_context(*pair) for pair in zip(firsts, coarse, strict=True)]
        entries = [
            _look_up(job.slots, first + (state & (SLOTS - 1)), own)
            for first, state, own in zip(firsts, states, memory, strict=True)
        ]
        states = [_moved(*pair) for pair in zip(entries, states, strict=True)]
        position, states = _filled(job, position, states)
        _write(form, entries, coarse, parts)
        if form != REFINE:
            escapes = _with_escapes(job, entries, outs, escapes)

        carried = steps.close(position, escapes, *states)
        _, position, escapes, *states = rows.close(row.skip(job.stride), *carried)
        _finish(job, position, escapes, states)


def _look_up(table: Value, indices: Value, memory: Value) -> Value:
    """Look up `table[indices]`, lane by lane, by way of memory: loads cost less than taking lanes out of registers.

    Volatile, as LLVM would otherwise see through it.
    """
    k, found = indices.k, indices.k.poison(indices.type)
    k.emit(f"store volatile {indices.typed}, ptr {memory}, align 64")
    for lane in range(indices.lanes):
        index = k.emit_value("i32", f"load volatile i32, ptr {memory.at(lane)}, align 4")
        found = found.with_lane(lane, table.load(index.to("i64")))
    return found


def _moved(entry: Value, state: Value) -> Value:
    """Compute frequency * (state >> 11) + bias."""
    return ((entry >> 8) & 4095) * (state >> PROBABILITY_BITS) + (entry >> 20)


def _filled(job: Fields, position: Value, states: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Refill every state below 2^16 by a word; returns the next position, and the states.

    A damaged stream that asks for more words than there are reads on from the end.
    """
    words, filled = job.words.at(position.k.minimum(position, job.count)), list[Value]()
    for state in states:
        empty = state < LEAST_STATE
        bits = bits_of(empty)
        filled.append(empty.select((state << 16) | _expanded(words, empty, bits), state))
        count = count_bits(bits)
        words, position = words.at(count), position + count
    return position, filled


def _expanded(words: Value, mask: Value, bits: Value) -> Value:
    """Load the next words, one to each lane of the mask, as i32; other lanes get any number."""
    loaded = words.load(0, mask.lanes, align=1)
    if mask.k.isa is not AVX512:
        return permuted("expand", bits, loaded.to("i32"))
    # From a register: the instruction that expands from memory is slow on Zen 4.
    zeros = loaded.like(0)
    return mask.k.call("llvm.x86.avx512.mask.expand.v16i16", loaded.type, loaded, zeros, mask).to("i32")


def _expansions() -> list[list[int]]:
    """Return for every mask of eight lanes each lane's word: the number of lower lanes in the mask."""
    return [[(mask & ((1 << lane) - 1)).bit_count() for lane in range(8)] for mask in range(256)]


def _finish(job: Fields, position: Value, escapes: Value, states: Sequence[Value]) -> None:
    """Store the number of words that were asked for, or its negative complement; and the number of escapes."""
    job.escapes.store(escapes)
    wrong = states[0].like(0)
    for state in states:
        wrong = wrong | (state ^ LEAST_STATE)
    job.read.store(any_bits(wrong).ne(0).select(position ^ -1, position))


def _write(form: str, entries: Sequence[Value], coarse: Sequence[Value], parts: Sequence[Value]) -> None:
    """Write the symbols of slot entries as numbers of a form, or merged into a coarser level."""
    for index, (entry, out) in enumerate(zip(entries, parts, strict=True)):
        numbers = (entry & 255) - ZERO
        exact = numbers.to("float", signed=True) if form in FORMS[1:] else numbers
        if form == REFINE:
            numbers = _refined(coarse[index], numbers)
        elif form == "bfloat16":  # which holds numbers of 8 bits without rounding
            numbers = exact.bitcast("i32") >> 16
        elif form == "float16":
            numbers = narrow(exact, "float16")
        if numbers.element == "i32":
            numbers = numbers.to("i16")
        out.of(numbers.element).store(numbers)


def _with_context(bases: Value, coarse: Value) -> Value:
    """Return the first slots of the tables that coarser numbers choose: min(|q|, 2) tables on."""
    size = coarse.compare("slt", 0).select(-coarse, coarse)
    return bases + ((size > MOST_CONTEXT).select(size.like(MOST_CONTEXT), size) << PROBABILITY_BITS)


def _refined(coarse: Value, numbers: Value) -> Value:
    """Compute 3q + r away from zero, i32; all arithmetic wraps, so any number in `out` will do."""
    return coarse * 3 + coarse.compare("slt", 0).select(-numbers, numbers)


def _with_escapes(job: Fields, entries: Sequence[Value], outs: Sequence[Value], escapes: Value) -> Value:
    """Replace escapes among entries, of 32 columns for both of `outs`, by marked values; returns their count."""
    k, bits = escapes.k, escapes.like(0)
    for place, entry in enumerate(entries):
        bits = bits | (bits_of((entry & 255).eq(ESCAPE)) << (place * entry.lanes))

    def replace(lane: Value, number: Value) -> None:
        (lane < BLOCK).select(*outs).store(job.marked.load(k.minimum(number, job.last)), lane & (BLOCK - 1))

    return each_bit(bits & job.replace, escapes, replace)
