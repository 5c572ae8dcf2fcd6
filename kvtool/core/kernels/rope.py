"""Keys rotated on their way from one place to another, in machine code: read once, written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kvtool.core.kernels import FORMATS
from kvtool.core.native.builder import STORED, FunctionBuilder, Value, module
from kvtool.core.native.isa import Isa
from kvtool.core.native.jit import JOBS, Function, Job, compiled
from kvtool.core.native.simd import rotate

_WIDTH = 8  # numbers handled together
_FORMATS = frozenset((stored, output) for stored in FORMATS for output in (stored, torch.float32))
_JOB = Job(
    **{"from": "ptr", "from_head": "i64", "from_row": "i64", "to": "ptr", "to_head": "i64", "to_row": "i64"},
    **{"cos": "float*", "sin": "float*", "table_row": "i64", "heads": "i64", "rows": "i64"},
    half="i64",  # of the numbers that are rotated
    rest="i64",  # numbers after them, which are not
)


@dataclass(frozen=True, slots=True)
class CosSin:
    """cos and sin of some positions, float32 `[1, tokens, rotary_dim]`, as the model itself rounds them."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> CosSin:  # by token
        return CosSin(self.cos[:, rows], self.sin[:, rows])

    def inverse(self) -> CosSin:
        """The angles that undo these exactly, RoPE's attention scaling and rounding included.

        A pair is rotated by the matrix [[c, -s], [s, c]]; its inverse is [[c, s], [-s, c]] / (c² + s²).
        """
        norm = self.cos.square() + self.sin.square()
        return CosSin(self.cos / norm, -self.sin / norm)

    def fits(self, rows: int) -> bool:
        cos, sin = self.cos, self.sin
        return (
            cos.dtype == sin.dtype == torch.float32
            and cos.is_cpu
            and sin.is_cpu
            and cos.shape == sin.shape
            and cos.stride() == sin.stride()
            and cos.dim() == 3
            and len(cos) == 1
            and cos.shape[1] >= rows
            and cos.stride(2) == 1
        )

    def transposed(self) -> CosSin:
        return CosSin(self.cos, -self.sin)


@dataclass(frozen=True, slots=True)
class RopeTables:
    """CosSin of some positions for each RoPE of a model, by its name; most models have one, named ""."""

    by_name: Mapping[str, CosSin]

    def __getitem__(self, rows: slice | torch.Tensor) -> RopeTables:  # by token
        return self._each(lambda angles: angles[rows])

    def __len__(self) -> int:
        return next((angles.cos.shape[1] for angles in self.by_name.values()), 0)

    def inverse(self) -> RopeTables:
        return self._each(CosSin.inverse)

    def transposed(self) -> RopeTables:
        return self._each(CosSin.transposed)

    def _each(self, change: Callable[[CosSin], CosSin]) -> RopeTables:
        return RopeTables({name: change(angles) for name, angles in self.by_name.items()})


@dataclass(frozen=True, slots=True)
class CopyWithRope:
    """Numbers `[heads, rows, head_dim]` that go from one place to another of the same or a wider format.

    The table's angles of a row rotate its first columns; its second half is like the first. None: all stays as it is.
    """

    to: torch.Tensor
    numbers: torch.Tensor
    table: CosSin | None = None

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype]:
        return self.numbers.dtype, self.to.dtype

    @property
    def fits(self) -> bool:
        to, numbers = self.to, self.numbers
        return (
            to.shape == numbers.shape
            and to.dim() == 3
            and self.formats in _FORMATS
            and to.stride(2) == numbers.stride(2) == 1
            and to.is_cpu
            and numbers.is_cpu
            and not numbers.requires_grad
            and self._rotary_dim_fits()
        )

    def _rotary_dim_fits(self) -> bool:
        _, rows, head_dim = self.numbers.shape
        if self.table is None:
            return head_dim % _WIDTH == 0
        width = self.table.cos.shape[-1]
        whole = width % (2 * _WIDTH) == 0 == (head_dim - width) % _WIDTH
        return whole and width <= head_dim and self.table.fits(rows) and self.table.cos.shape[1] == rows

    def job(self) -> list[int]:
        to, numbers = self.to, self.numbers
        heads, rows, head_dim = numbers.shape
        table, width = [0, 0, 0], 0
        if self.table is not None:
            cos, sin = self.table.cos, self.table.sin
            table, width = [cos.data_ptr(), sin.data_ptr(), cos.stride(1)], cos.shape[2]
        places = [numbers.data_ptr(), *numbers.stride()[:2], to.data_ptr(), *to.stride()[:2]]
        return [*places, *table, heads, rows, width // 2, head_dim - width]


def rotate_halves_torch(heads: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate heads `[1, heads, rows, head_dim]` by halves in torch: in float32, rounded once; the rest stays."""
    width = cos_sin.cos.shape[-1]
    wide = heads[..., :width].float()
    low, high = wide.chunk(2, -1)
    rotated = wide * cos_sin.cos[:, None] + torch.cat([-high, low], -1) * cos_sin.sin[:, None]
    return torch.cat([rotated.to(heads.dtype), heads[..., width:]], -1)


def copy_with_rope(moves: Sequence[CopyWithRope], isa: Isa) -> bool:
    """Make all moves in one call, only in the calling thread and without Python's lock.

    In float32, each product and sum rounded as torch rounds them one by one, and the result once: the same bits as
    x · cos + rotate_half(x) · sin. A move may be in place. Returns False: there is no machine code for one of them, or
    they differ in formats; then nothing was moved.
    """
    if not moves:
        return True
    formats = moves[0].formats
    if not all(move.formats == formats and move.fits for move in moves):
        return False
    stored, output = (FORMATS[dtype] for dtype in formats)
    jobs = np.array([move.job() for move in moves], np.int64)
    _function(isa, stored, output)(jobs.ctypes.data, len(jobs))
    return True


@cache
def _function(isa: Isa, stored: str, output: str) -> Function:
    return compiled(rotation_module(stored, output, isa), isa, "rotate")[0]


def rotation_module(stored: str, output: str, isa: Isa) -> str:
    k = FunctionBuilder("rotate", isa, JOBS)
    k.keeps_nan = True
    with _JOB.each(k) as job, k.loop(job.rows, may_be_empty=True) as row:
        cos, sin = (side.at(row * job.table_row) for side in (job.cos, job.sin))
        with k.loop(job.heads, may_be_empty=True) as head:
            source, target = (
                job[side].of(form).at(head * job[f"{side}_head"] + row * job[f"{side}_row"])
                for side, form in (("from", stored), ("to", output))
            )
            _rotate_row(k, source, target, (cos, sin), job.half)
            rotated = job.half * 2
            if stored == output:  # bit by bit
                source, target = (side.of(STORED[stored]) for side in (source, target))
            with k.loop(job.rest // _WIDTH, may_be_empty=True) as index:
                offset = index * _WIDTH + rotated
                target.store(source.load(offset, _WIDTH), offset)
    return module(k)


def _rotate_row(k: FunctionBuilder, source: Value, target: Value, table: tuple[Value, Value], half: Value) -> None:
    done: Value | int = 0
    for width in sorted({k.isa.width, _WIDTH}, reverse=True):
        with k.loop((half - done) // width, may_be_empty=True) as index:
            first = index * width + done
            offsets = first, first + half
            cos, sin = (side.load(first, width) for side in table)
            low, high = (source.load(offset, width) for offset in offsets)
            for value, offset in zip(rotate(low, high, cos, sin), offsets, strict=True):
                target.store(value, offset)
        done = half // width * width
