"""How attention is cut into what fits registers and caches, by instruction set and number format."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.native.builder import FunctionBuilder
from kvtool.core.native.isa import AVX512, Isa
from kvtool.core.native.job import LINE

KEYS = 96  # of a tile: a multiple of every `keys_once`


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one kernel is made for.

    A *lane* is one query row of one head; the heads of a group that share a key stand beside each other. Scores are
    held transposed, keys × lanes: a row's maximum and sum are then plain operations between registers.

    Attributes
    ----------
    isa : the instruction set.
    stored : the format of queries, keys, values and results (a name of `STORED`).
    pairs : products of bfloat16 pairs summed in float32 (AVX-512 BF16); else everything is made float32 first.
    """

    isa: Isa
    stored: str
    pairs: bool = False

    @property
    def width(self) -> int:
        """float32 lanes of a register."""
        return self.isa.width

    @property
    def registers(self) -> int:
        """Registers of lanes that a product holds beside each other."""
        return 3

    @property
    def keys_once(self) -> int:
        """Keys, or columns of values, that a product holds below each other: with `registers` all that there are."""
        return 8 if self.width == AVX512.width else 4

    @property
    def strip(self) -> int:
        """Lanes that are handled together."""
        return self.registers * self.width

    @property
    def lanes(self) -> int:
        """Most lanes of a block: for so many are keys and values brought from memory once."""
        return 5 * self.strip

    @property
    def kept(self) -> str:
        """Numbers of a tile of keys or values, in LLVM's words."""
        return "i16" if self.pairs else "float"

    @property
    def starts(self) -> range:
        """The first lane of each register of a strip."""
        return range(0, self.strip, self.width)

    def function(self, name: str, arguments: str) -> FunctionBuilder:
        """Begin a function of the kernel's own module."""
        return FunctionBuilder(name, self.isa, arguments, internal=True)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a thread has to itself: offsets in bytes."""

    limits: int
    begins: int
    queries_at: int
    results_at: int
    largest: int
    sums: int
    now_largest: int
    shrink: int
    scores: int
    sized: int  # from here on sizes depend on head_dim and value_dim

    @classmethod
    def of(cls, tiling: Tiling) -> Scratch:
        """Lay it out."""
        lanes, strip = tiling.lanes, tiling.strip
        sizes = [4 * lanes, 4 * lanes, 8 * lanes, 8 * lanes, 4 * lanes, 4 * lanes]
        sizes += [4 * strip, 4 * strip, 4 * KEYS * strip]
        places = [0]
        for size in sizes:
            places.append(-(-(places[-1] + size) // LINE) * LINE)
        return cls(*places)

    def bytes(self, tiling: Tiling, head_dim: int, value_dim: int) -> int:
        """All of it: beside the above queries, results, keys, values, values as they came, and a row nobody reads."""
        return self.sized + 4 * ((tiling.lanes + KEYS) * (head_dim + value_dim) + (KEYS + 1) * value_dim)
