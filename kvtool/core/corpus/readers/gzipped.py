"""A file that gzip has packed, as Debian packs manual pages: read as what its name says without the `.gz`."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import PurePath

from kvtool.core.corpus.readers.document import EmptyFile, UnreadableFile

ENDING = ".gz"
_MAGIC = b"\x1f\x8b"
_MOST_BYTES = 1 << 28  # unpacked


def inner(path: PurePath) -> PurePath:
    """Return what a packed file is called unpacked; any other path as it is."""
    return path.with_suffix("") if path.suffix.lower() == ENDING else path


def beginning(data: bytes, most: int) -> bytes:
    """Unpack what the first bytes of a file hold, at most so many bytes; what gzip has not packed stays as it is."""
    if not data.startswith(_MAGIC):
        return data
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, most)  # 16: gzip's header
    except zlib.error:
        return data


def unpacked(data: bytes) -> bytes:
    """Return what a packed file holds.

    Raises
    ------
    UnreadableFile : it is damaged, or unpacks to more than 256 MiB. EmptyFile : it holds nothing.
    """
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableFile("damaged: gzip cannot unpack it") from error
    if len(content) > _MOST_BYTES:
        raise UnreadableFile(f"unpacks to over {_MOST_BYTES >> 20} MiB")
    if not content:
        raise EmptyFile("empty")
    return content
