"""Count what a store holds: the chunks of documents, and separately the prompt's own beginning."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


def sizes_of(store: Store) -> dict[str, Any]:
    """Count what is stored.

    Returns
    -------
    What `Store.stats` tells, where `chunks` and `tokens` are those of documents; `beginning`: `id`, `tokens`,
    `levels[{level, bytes}]` of the prompt's own, or None; and `unfinished`: `files`, `chunks`, `tokens`, `bytes` of
    what interrupted ingests have stored. Records, bytes and levels are of all three.

    Raises
    ------
    DamagedError : the store's manifest is.
    """
    sizes, identity = store.stats(), StoreIdentity.from_manifest(store.manifest())
    beginning = None if identity is None else _beginning(store, identity)
    if beginning is not None:
        sizes = sizes | {"chunks": sizes["chunks"] - 1, "tokens": sizes["tokens"] - beginning["tokens"]}
    unfinished = _unfinished(store)
    sizes = sizes | {name: sizes[name] - unfinished[name] for name in ("chunks", "tokens")}
    return sizes | {"beginning": beginning, "unfinished": unfinished}


def _unfinished(store: Store) -> dict[str, int]:
    """Count what is stored of files of which an ingest was interrupted."""
    found = {"files": len(store.unfinished()), "chunks": 0, "tokens": 0, "bytes": 0}
    with suppress(DamagedError):  # of a document, so that what it refers to is unknown, or of such a chunk
        for chunk in store.unfinished_chunks():
            sizes, info = store.sizes_here(chunk), store.chunk_info(chunk)
            found["chunks"] += 1
            found["tokens"] += len(info.token_ids) if info is not None and sizes else 0
            found["bytes"] += sum(sizes.values())
    return found


def _beginning(store: Store, identity: StoreIdentity) -> dict[str, Any] | None:
    """What is stored of the prompt's own beginning, a chunk that no document has."""
    try:
        info = store.chunk_info(identity.prefix_id)
    except DamagedError:
        return None
    if info is None:
        return None
    levels = store.sizes_here(identity.prefix_id)
    tokens = len(info.token_ids) if levels else 0
    return {"id": identity.prefix_id.hex(), "tokens": tokens, "levels": level_rows(levels)}
