"""What a store keeps of its chunks."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtool.core.cache.store import Store
from kvtool.core.records.read import read_chunk
from tests.cli.working import LAYERS


def records(path: Path) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    with Store.open(path) as store:
        found = {chunk_id: read_chunk(store, chunk_id, "raw", LAYERS) for chunk_id in store.chunk_ids()}
    return {chunk_id: (torch.stack([*kv.keys]), torch.stack([*kv.values])) for chunk_id, kv in found.items()}


def sensitivity(path: Path) -> dict[bytes, torch.Tensor]:
    with Store.open(path) as store:
        infos = {chunk_id: store.chunk_info(chunk_id) for chunk_id in store.chunk_ids()}
    kept = {chunk_id: bytearray(info.sensitivity) for chunk_id, info in infos.items() if info and info.sensitivity}
    return {chunk_id: torch.frombuffer(data, dtype=torch.float16).float() for chunk_id, data in kept.items()}
