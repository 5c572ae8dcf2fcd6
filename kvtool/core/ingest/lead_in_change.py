"""Change of the lead-in, and its effect on the chunks that a store has."""

from __future__ import annotations

from contextlib import suppress

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import StoreIdentity


def lead_in_change(
    store: Store, known: StoreIdentity, identity: StoreIdentity, read: set[str], gone: set[str]
) -> tuple[str, str]:
    """Word a warning and its hint: what is read now is made anew behind the new lead-in; every other chunk stays as it
    is, and is found as before.

    Parameters
    ----------
    read, gone : paths of files that are read now, and of those that are forgotten.
    """
    kept, anew = _counted(store, read, gone)
    text = f"the lead-in changes from {known.lead_in.mode!r} to {identity.lead_in.mode!r}: {anew} chunks are made anew"
    if not kept:
        return text, ""
    return (
        f"{text}; {kept} chunks of other documents keep theirs, and are found as before",
        "ingest the other documents again to have them after the new one, too",
    )


def _counted(store: Store, read: set[str], gone: set[str]) -> tuple[int, int]:
    """Count the stored chunks that only documents of files have which are neither read nor forgotten now, and those
    that documents of files have which are read."""
    chunks: dict[bool, set[bytes]] = {False: set(), True: set()}
    for entry in store.files():
        for source in entry.documents if entry.path not in gone else ():
            with suppress(DamagedError):  # what it has is unknown; nothing but this count hangs on it
                document = store.document(source)
                chunks[entry.path in read] |= {ref.chunk_id for ref in document.chunks} if document else set()
    return len(chunks[False] - chunks[True]), len(chunks[True])
