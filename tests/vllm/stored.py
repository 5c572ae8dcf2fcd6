"""Records of a store, and prompts of its chunks among other text, as token ids."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtool.core.cache.store import Store
from kvtool.core.records.read import read_chunk
from tests.cli.working import LAYERS

OWN, QUESTION = (70, 71, 72, 73, 74, 75, 76), (90, 91, 92, 93, 94)  # any ids do: nothing decodes them


def prompt_of(store: Path, first: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Three chunks from number `first` on, the last one cut, and a question; and where the chunks are."""
    with Store.open(store) as opened:
        infos = [opened.chunk_info(ref.chunk_id) for one in opened.documents() for ref in one.chunks]
    chunks = [info.token_ids for info in infos if info is not None and len(info.token_ids) >= 32][first : first + 3]
    chunks[-1] = chunks[-1][:-4]
    ids, places = list[int](), list[tuple[int, int]]()
    for chunk in chunks:
        ids += OWN
        places.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return [*ids, *QUESTION], places


def records(path: Path) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    with Store.open(path) as store:
        found = {chunk_id: read_chunk(store, chunk_id, "raw", LAYERS) for chunk_id in store.chunk_ids()}
    return {chunk_id: (torch.stack([*kv.keys]), torch.stack([*kv.values])) for chunk_id, kv in found.items()}


def sensitivity(path: Path) -> dict[bytes, torch.Tensor]:
    with Store.open(path) as store:
        infos = {chunk_id: store.chunk_info(chunk_id) for chunk_id in store.chunk_ids()}
    kept = {chunk_id: bytearray(info.sensitivity) for chunk_id, info in infos.items() if info and info.sensitivity}
    return {chunk_id: torch.frombuffer(data, dtype=torch.float16).float() for chunk_id, data in kept.items()}
