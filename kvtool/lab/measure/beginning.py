"""The prompt's own beginning, which a store keeps as a chunk that no document has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity


def beginning_of(store: Store, identity: StoreIdentity) -> dict[str, Any] | None:
    """`id`, `chunks` (1), `tokens`, `levels[{level, bytes}]` of it, which `store stats` counts like any other chunk,
    and `store ls`, which lists documents, does not. None where nothing of it is stored."""
    try:
        info = store.chunk_info(identity.prefix_id)
    except DamagedError:
        return None
    if info is None:
        return None
    levels = store.level_sizes(identity.prefix_id)
    tokens = len(info.token_ids) if levels else 0
    return {"id": identity.prefix_id.hex(), "chunks": 1, "tokens": tokens, "levels": level_rows(levels)}
