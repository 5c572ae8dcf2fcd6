"""What a store holds in numbers: the chunks of documents, and the prompt's own beginning apart from them."""

from __future__ import annotations

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
    What `Store.stats` tells, where `chunks` and `tokens` are those of documents, and `beginning`: `id`, `tokens`,
    `levels[{level, bytes}]` of the prompt's own, or None. Records, bytes and levels are of both.

    Raises
    ------
    DamagedError : the store's manifest is.
    """
    sizes, identity = store.stats(), StoreIdentity.from_manifest(store.manifest())
    beginning = None if identity is None else _beginning(store, identity)
    if beginning is not None:
        sizes = sizes | {"chunks": sizes["chunks"] - 1, "tokens": sizes["tokens"] - beginning["tokens"]}
    return sizes | {"beginning": beginning}


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
