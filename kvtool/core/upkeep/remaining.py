"""What a store that is still too large is made of, in bytes; see `PruneReport.in_the_way`."""

from __future__ import annotations

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.upkeep.inventory import Inventory, pages


def remaining(store: Store, inventory: Inventory, size: int) -> dict[str, int]:
    """Take apart what a prune has left.

    Returns
    -------
    `pinned` : KV of chunks that are pinned.
    `text` : of documents.
    `chunks` : what is known of each chunk beside its KV: token ids, times, levels.
    `beginning` : KV of the prompt's own beginning, which every question reads.
    `profiles` : codec profiles and learned lead-ins that are in use.
    `beside` : index, vectors, marks and logs, in files of their own.
    `free` : free pages of the data file, where it was not to be compacted.
    `other` : of `size` bytes what is none of these: KV that stays, and the pages that find everything.
    """
    with store.snapshot() as snapshot:
        chunks, profiles = (
            sum(pages(length) for _, length in snapshot.sizes(table)) for table in (tables.CHUNKS, tables.PROFILES)
        )
    identity = StoreIdentity.from_manifest(store.manifest())
    first = inventory.chunks.get(identity.prefix_id) if identity is not None and identity.prefix else None
    parts = {
        "pinned": sum(sum(each.levels.values()) for each in inventory.chunks.values() if each.pinned),
        "text": sum(document.size for document in inventory.documents),
        "chunks": chunks,
        "beginning": sum(first.levels.values()) if first is not None and not first.pinned else 0,
        "profiles": profiles,
        "beside": max(0, inventory.used - store.environment.file_bytes()),
        "free": inventory.free,
    }
    return parts | {"other": max(0, size - sum(parts.values()))}
