"""Where a bench keeps what it makes; no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtool.core.common.places import cache_dir
from kvtool.core.common.private import make_folder


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, in $TMPDIR where that is set, else in kvtool's cache: /tmp may be no disk."""
    parent = None if os.environ.get("TMPDIR") else cache_dir()
    if parent is not None:
        make_folder(parent)
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-", dir=parent) as folder:
        yield Path(folder)
