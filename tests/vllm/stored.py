"""Prompts of a store's chunks among other text, as token ids."""

from __future__ import annotations

from pathlib import Path

from kvtool.core.cache.store import Store

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
