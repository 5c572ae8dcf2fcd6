"""Stretches in a pack: their values as they stand in a store, one a member, each with its digest.

They are not in the catalogue, which shared tiers have, too: whoever does not know them passes over them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Protocol

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import Place, StretchInfo, named_part, opened_info, opened_part, part_name
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError
from kvtool.core.pack.container import PackWriter
from kvtool.core.remote.limits import MOST_BYTES
from kvtool.core.remote.transfer_report import TransferReport

_INFO = re.compile(rf"stretch/([0-9a-f]{{{2 * ID_BYTES}}})")
_MOST_INFO = 2**24


def wanted(store: Store, chunks: Collection[bytes]) -> dict[bytes, StretchInfo]:
    """The stretches of prompts that were made of these chunks only, behind the store's own instruction."""
    there = {*chunks}
    return {
        stretch: info
        for stretch, info in sorted(store.stretches().items())
        if info.own and not info.alone and there.issuperset(info.chunks)
    }


def give(store: Store, out: PackWriter, stretch: bytes, info: StretchInfo) -> None:
    """Add a stretch to a pack. Raises DamagedError."""
    sealed = [(part_name(place), store.sealed_part(stretch, place)) for place in info.places]
    out.add(f"stretch/{stretch.hex()}", store.sealed_stretch(stretch))
    for name, value in sealed:
        out.add(f"stretch/{stretch.hex()}/{name}", value)


class Members(Protocol):
    """Protocol of a source of stretches: a pack, or a store."""

    @property
    def names(self) -> Iterable[str]:
        """Return the names of all members, or of the stretches only."""
        ...

    def get(self, name: str, most: int) -> bytes | None:
        """A member, None where there is none; empty where it is damaged or larger than `most`."""
        ...


def take(store: Store, writer: Writer, pack: Members, report: TransferReport) -> None:
    """Take in what a pack has and the store has not; of what is damaged nothing is taken, and it is said."""
    chunks = {*store.chunk_ids()}
    for stretch in [bytes.fromhex(found[1]) for name in pack.names if (found := _INFO.fullmatch(name))]:
        try:
            info = opened_info(stretch, pack.get(f"stretch/{stretch.hex()}", _MOST_INFO) or b"")
            if not info.alone and chunks.issuperset(info.chunks) and not _is_here(store, stretch, info):
                parts = [(place, _part(pack, stretch, place)) for place in info.places]
                writer.put_stretch(stretch, info, parts)
                report.bytes += sum(len(payload) for _, payload in parts)
        except DamagedError as error:
            report.note_damage(f"stretch {stretch.hex()}", error.message)


def _is_here(store: Store, stretch: bytes, info: StretchInfo) -> bool:
    try:
        here = store.stretch(stretch)
    except DamagedError:  # a sound one takes its place
        return False
    return here is not None and len(here.states) >= len(info.states)


def _part(pack: Members, stretch: bytes, place: Place) -> bytes:
    value = pack.get(f"stretch/{stretch.hex()}/{part_name(place)}", MOST_BYTES)
    if not value:
        raise DamagedError(f"the {named_part(place)} are missing")
    return bytes(opened_part(stretch, place, value))
