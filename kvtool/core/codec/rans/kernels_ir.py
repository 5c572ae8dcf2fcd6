"""rANS decoders and encoders in LLVM IR (the bytes: tables.py), and kernels that make symbols of numbers.

A decoder checks only its own reading. At every step it reads at most 64 words from no later than the end of the words,
so the 128 bytes after them must be readable. It counts the words that a stream asks for, which the caller compares with
theirs; and it compares the states that are left with those that an encoder begins with.

An encoder runs from the last step to the first and from lane 63 to 0, and gives its words in the order it makes them.
So inside, lane `i` is the stream's lane `63 - i`, and `bases`, `words` and `states` are the caller's backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.codec.rans.tables import (
    ALPHABET,
    BLOCK,
    CUMULATIVE_AT,
    ESCAPE,
    LANES,
    LEAST_STATE,
    MOST_CONTEXT,
    PROBABILITY_BITS,
    SLOTS,
    ZERO,
)
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, module
from kvtool.core.native.isa import AVX512, Isa
from kvtool.core.native.jit import JOBS, Job
from kvtool.core.native.simd import any_bits, bits_of, count_bits, each_bit, permutations, permuted

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
    marked="i16*",  # [last + 1]: what takes the escapes' places, one after another; not where columns refine
    last="i64",
    replace="i64",  # all bits where escapes are replaced, else 0
    escapes="i64*",  # how many were
    read="i64*",  # words the stream asked for; their complement: its states do not end right
)
ENCODE = Job(
    symbols="i8*",  # [rows, columns]: its end
    contexts="i8*",  # [rows, columns]: its end; any address without contexts
    bases="i32*",  # [columns]: first entry of the column's table, last column first
    entries="i32*",  # [tables * 256]: frequency | cumulative << 12 | MISSING
    states="i32*",  # [64]
    words="i16*",  # capacity: rows * columns + 16
    rows="i64",  # at least 1
    groups="i64",  # columns / 64, at least 1
    written="i64*",  # words
    missing="i32*",  # negative where a symbol had no frequency
)
_SOURCE = {
    "numbers": "i16*",  # [rows, stride]
    "stride": "i64",  # bytes from row to row of `numbers`
    "places": "i32*",  # [columns / 32]
    "rows": "i64",  # at least 1
    "blocks": "i64",  # columns / 32, at least 1
}
SYMBOLS = Job(
    **_SOURCE,
    low="i16*",  # [columns]: least number of the column's table
    many="i16*",  # [columns]: how many it has from there on
    symbols="i8*",  # [rows, columns]
    escapes="i64*",  # how many symbols are escapes
    marked="i16*",  # the numbers that these stand for, row by row; capacity: one a symbol
)
FINER = Job(
    **_SOURCE,
    coarse="i16*",  # [rows, stride]: numbers of the coarser level
    symbols="i8*",  # [rows, columns]
    contexts="i8*",  # [rows, columns]
)


@dataclass(frozen=True, slots=True)
class Decode:
    refines: bool = False

    def __call__(self, isa: Isa) -> str:
        """Keep 64 lanes in registers. A step's lookups come before its words, which depend on one another."""
        k = FunctionBuilder("run", isa, JOBS)
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
            coarse = [part.load(0, width).to("i32", signed=True) for part in parts] if self.refines else []
            if coarse:
                firsts = [_with_context(*pair) for pair in zip(firsts, coarse, strict=True)]
            entries = [
                _entries_by_memory(job.slots, first + (state & (SLOTS - 1)), own)
                for first, state, own in zip(firsts, states, memory, strict=True)
            ]
            states = [
                ((entry >> 8) & 4095) * (state >> PROBABILITY_BITS) + (entry >> 20)
                for entry, state in zip(entries, states, strict=True)
            ]
            position, states = _filled(job, position, states)
            _write(entries, coarse, parts)
            if not self.refines:
                escapes = _with_escapes(job, entries, outs, escapes)

            carried = steps.close(position, escapes, *states)
            _, position, escapes, *states = rows.close(row.skip(job.stride), *carried)
            job.escapes.store(escapes)
            wrong = states[0].like(0)
            for state in states:
                wrong = wrong | (state ^ LEAST_STATE)
            job.read.store(any_bits(wrong).ne(0).select(position ^ -1, position))
        # For every mask of eight lanes each lane's word: the number of lower lanes in the mask.
        expansions = [[(mask & ((1 << lane) - 1)).bit_count() for lane in range(8)] for mask in range(256)]
        return module(k, constants="" if isa is AVX512 else permutations("expand", expansions))


def _entries_by_memory(table: Value, indices: Value, memory: Value) -> Value:
    """Look up `table[indices]`, lane by lane, by way of memory: loads cost less than taking lanes out of registers.

    Volatile, as LLVM would otherwise see through it.
    """
    k, found = indices.k, indices.k.poison(indices.type)
    k.emit(f"store volatile {indices.typed}, ptr {memory}, align 64")
    for lane in range(indices.lanes):
        index = k.emit_value("i32", f"load volatile i32, ptr {memory.at(lane)}, align 4")
        found = found.with_lane(lane, table.load(index.to("i64")))
    return found


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


def _write(entries: Sequence[Value], coarse: Sequence[Value], parts: Sequence[Value]) -> None:
    for index, (entry, out) in enumerate(zip(entries, parts, strict=True)):
        numbers = (entry & 255) - ZERO
        if coarse:
            numbers = _refined(coarse[index], numbers)
        out.of("i16").store(numbers.to("i16"))


def _with_context(bases: Value, coarse: Value) -> Value:
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


@dataclass(frozen=True, slots=True)
class Encode:
    contexts: bool

    def __call__(self, isa: Isa) -> str:
        k = FunctionBuilder("run", isa, JOBS)
        width = k.width
        with ENCODE.each(k) as job:
            starts = [job.states.load(lane, width) for lane in range(0, LANES, width)]
            rows = k.loop(job.rows, job.words, k.constant("i64"), k.zeros(width, "i32"), *starts)
            steps = k.loop(job.groups, *rows.values)
            words, end, missing, *states = steps.values

            end = end - LANES
            bases = job.bases.at(steps.index << 6)
            entries = []
            for lane in range(0, LANES, width):
                at = end + (LANES - width - lane)
                index = bases.load(lane, width) + _backwards(job.symbols, at, width)
                if self.contexts:
                    index = index + _backwards(job.contexts, at, width) * ALPHABET
                entries.append(_look_up(job.entries, index))
            for place, entry in enumerate(entries):
                missing = missing | entry
                words, states[place] = _put(words, entry, states[place])

            words, _, missing, *states = rows.close(*steps.close(words, end, missing, *states))
            missing = any_bits(missing)
            job.written.store((words.to("i64") - job.words.to("i64")) >> 1)
            job.missing.store(missing)
            for lane, state in zip(range(0, LANES, width), states, strict=True):
                job.states.store(state, lane)
        lanes = [[lane for lane in range(8) if mask >> lane & 1] for mask in range(256)]
        compressions = [row + [0] * (8 - len(row)) for row in lanes]
        return module(k, constants="" if isa is AVX512 else permutations("compress", compressions))


def _backwards(pointer: Value, index: Value, width: int) -> Value:
    return pointer.load(index, width).shuffle([*reversed(range(width))]).to("i32")


def _look_up(table: Value, indices: Value) -> Value:
    found = indices.k.poison(indices.type)
    for lane in range(indices.lanes):
        found = found.with_lane(lane, table.load(indices.lane(lane).to("i64")))
    return found


def _put(words: Value, entry: Value, state: Value) -> tuple[Value, Value]:
    frequency, cumulative = entry & (2 * SLOTS - 1), (entry >> CUMULATIVE_AT) & (SLOTS - 1)
    full = (state >> (32 - PROBABILITY_BITS)) >= frequency  # frequency << 21 would not fit for one of 2048
    bits = bits_of(full)
    words.store(_compressed(state, full, bits))
    state = full.select(state >> 16, state)
    return words.at(count_bits(bits)), next_state(state, frequency, cumulative)


def next_state(state: Value, frequency: Value, cumulative: Value) -> Value:
    """Compute (state // frequency << 11) + state % frequency + cumulative, for 32 <= state / frequency < 2^21.

    The quotient is below 2^21, so rounding the state and then the ratio to float32 moves it by little more than
    2^21 * (2^-24 + 2^-24) = 1/4. Half is taken off: cutting the fraction gives the quotient or one less, and the
    remainder shows which.
    """
    quotient = (state.to("float") / frequency.to("float") - 0.5).to("i32")
    rest = state - quotient * frequency
    # One more in the quotient: 2048 more for it, a frequency less in the remainder.
    correction = (rest >= frequency).select(SLOTS - frequency, 0)
    return ((quotient << PROBABILITY_BITS) + rest) + (correction + cumulative)


def _compressed(state: Value, mask: Value, bits: Value) -> Value:
    """Return the low halves of the mask's lanes, first lane first; anything follows, which the next words overwrite."""
    if mask.k.isa is not AVX512:
        return permuted("compress", bits, state).to("i16")
    low = state.to("i16")
    return mask.k.call("llvm.x86.avx512.mask.compress.v16i16", low.type, low, low.like(0), mask)


def symbols_module(isa: Isa) -> str:
    k = FunctionBuilder("run", isa, JOBS)
    with SYMBOLS.each(k) as job:
        rows = k.loop(job.rows, job.numbers, job.symbols, k.constant("i64"))
        row, *carried = rows.values
        blocks = k.loop(job.blocks, *carried)
        symbols, escapes = blocks.values

        begin, column = row.at(job.places.load(blocks.index).to("i64")), blocks.index << 5
        numbers = begin.load(0, BLOCK)
        low, many = (pointer.load(column, BLOCK) for pointer in (job.low, job.many))
        escape = (numbers - low) >= many  # both ends at once: unsigned, a number below the least is huge
        symbols.store(escape.select(numbers.to("i8").like(ESCAPE - 256), numbers.to("i8") + (ZERO - 256)))
        escapes = each_bit(bits_of(escape), escapes, lambda lane, number: job.marked.store(begin.load(lane), number))

        symbols, escapes = blocks.close(symbols.at(BLOCK), escapes)
        _, _, escapes = rows.close(row.skip(job.stride), symbols, escapes)
        job.escapes.store(escapes)
    return module(k)


def finer_module(isa: Isa) -> str:
    k = FunctionBuilder("run", isa, JOBS)
    with FINER.each(k) as job:
        rows = k.loop(job.rows, k.constant("i64"), k.constant("i64"))
        row, at = rows.values
        blocks = k.loop(job.blocks, at)
        (at,) = blocks.values
        place = job.places.load(blocks.index).to("i64")
        fine, coarse = (pointer.skip(row).load(place, BLOCK) for pointer in (job.numbers, job.coarse))
        negative = coarse.compare("slt", 0)
        rest, size = (negative.select(-value, value) for value in (fine - coarse * 3, coarse))
        context = (size > MOST_CONTEXT).select(size.like(MOST_CONTEXT), size)
        job.symbols.store(rest.to("i8") + (ZERO - 256), at)
        job.contexts.store(context.to("i8"), at)
        (at,) = blocks.close(at + BLOCK)
        rows.close(row + job.stride, at)
    return module(k)
