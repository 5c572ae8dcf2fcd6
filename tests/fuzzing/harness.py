"""Helpers of targets: a folder of a process's own, and the errors that count as a refusal."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtool.core.errors import KvtoolError


def scratch(name: str) -> Path:
    """Make a folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvtool-fuzz-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def refused(*also: type[Exception]) -> Iterator[None]:
    """Ignore an error that says what is wrong, or one of `also`: neither is a finding."""
    with contextlib.suppress(KvtoolError, *also):
        yield
