"""What targets share: a folder of a process's own, and what counts as a polite refusal."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtool.core.errors import KvtoolError


def scratch(name: str) -> Path:
    """A new folder that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvtool-fuzz-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def refused(*also: type[Exception]) -> Iterator[None]:
    """Take an error that tells a user what is wrong, or one of `also`, for what it is: no finding."""
    with contextlib.suppress(KvtoolError, *also):
        yield
