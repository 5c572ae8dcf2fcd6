"""A substitute for the kernel that places a layer, on the pretended GPU; records as a store gives them; cases there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtool.core.cache.backend import KVRead
from kvtool.core.cache.chunks import read_record
from kvtool.core.cache.record import Allocator, KVHeader, aligned, encode_record
from kvtool.core.codec.base import NAMES
from kvtool.core.codec.levels import RAW
from kvtool.core.codec.lossless import Raw
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.loader import LayerMemory
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import ChunkCache, StoreSource, held_on
from kvtool.core.kernels import placing_triton as triton_place
from kvtool.core.model.rope import Rotary
from tests.families import tiny_model
from tests.fusion.making import BOS, CHUNKS, Case, Ids, decoder_of, on_cpu
from tests.pretended import streams

RopeTables = npt.NDArray[np.int64]


@dataclass
class Kernel:
    """Follows the table of addresses when the stream comes to it, as the kernel does. `kept`: what records crossed to;
    a GPU's allocator gives it away again in the order of the stream only."""

    launches: list[RopeTables] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def instead(cls, patch: pytest.MonkeyPatch) -> Kernel:
        kernel = cls()
        targets = LayerMemory.targets

        def remembered(self: LayerMemory, device: torch.device) -> list[torch.Tensor]:
            made = targets(self, device)
            kernel.kept.extend(made)
            return made

        patch.setattr(LayerMemory, "targets", remembered)
        patch.setattr(triton_place, "place", kernel.place)
        patch.setattr(Rotary, "by_kernel", True)
        return kernel

    def place(self, table: RopeTables, there: Any, keys: Any, values: Any, cos: Any, sin: Any) -> None:
        sides = keys.inner, values.inner
        turns = (None, None) if cos is None else (cos.inner, sin.inner)
        triton_place._check(table, there.inner, *sides, *turns)
        self.launches.append(table.copy())
        streams.current().put(lambda: _follow(there.inner, sides, turns))


def _follow(there: torch.Tensor, sides: Sequence[torch.Tensor], turns: Sequence[torch.Tensor | None]) -> None:
    for row in there.reshape(-1, triton_place.FIELDS).tolist():
        span = slice(row[6], row[6] + row[7])
        for number, buffer in enumerate(sides):
            part = _at(buffer, *row[3 * number : 3 * number + 3], row[7])
            cos, sin = turns
            if number == 0 and cos is not None and sin is not None:
                wide, width = part.float(), cos.shape[1]
                low, high = wide[:, :, :width].chunk(2, -1)
                wide[:, :, :width] = wide[:, :, :width] * cos[span] + torch.cat((-high, low), -1) * sin[span]
                part = wide.to(part.dtype)
            buffer[0, :, span] = part


def _at(buffer: torch.Tensor, address: int, head: int, row: int, tokens: int) -> torch.Tensor:
    _, heads, _, head_dim = buffer.shape
    extent = (heads - 1) * head + (tokens - 1) * row + head_dim
    memory = (ctypes.c_char * (extent * buffer.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=buffer.dtype).as_strided((heads, tokens, head_dim), (head, row, 1)).clone()


@dataclass
class Records:
    """A store of what a case keeps (a `ChunkReader`); `change` is made to the bytes of each record."""

    case: Case
    change: Callable[[bytearray, int], None] = lambda data, layer: None

    def levels(self, chunk_id: bytes) -> list[str]:
        return [RAW]

    def read_layer(
        self,
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None] = lambda number: None,
        room: Allocator = aligned,
    ) -> list[KVRead | KvtoolError | None]:
        found = []
        for number, chunk_id in enumerate(chunk_ids):
            before(number)
            data = bytearray(self._record(chunk_id, layer))
            self.change(data, layer)
            copy = room(len(data))
            copy[:] = data
            found.append(read_record(chunk_id, level, layer, copy))
        return found

    def _record(self, chunk_id: bytes, layer: int) -> bytes:
        keys, values = self.case.kept[chunk_id].keys[layer], self.case.kept[chunk_id].values[layer]
        heads, tokens, head_dim = keys.shape
        header = KVHeader(NAMES[keys.dtype], heads, tokens, head_dim, head_dim, RAW, layer)
        return encode_record(chunk_id, header, Raw(RAW).encode(keys, values))


def on_gpu(name: str) -> Case:
    return Case(name, "float32", decoder_of(tiny_model(name), "cuda"))


def held_on_gpu(case: Case) -> ChunkCache:
    return ChunkCache(StoreSource(Records(case), case.decoder), 10**9, device=held_on(case.decoder))


def logits_on_cpu(name: str, selector: Selector, chunks: Sequence[Ids] = CHUNKS) -> torch.Tensor:
    case = on_cpu(name)
    return case.fuse(case.plan(chunks, lead_in=BOS), selector).logits
