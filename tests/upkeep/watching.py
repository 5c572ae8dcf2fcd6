"""Measures a store's folder while others write to it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path


class Watcher:
    """The most bytes of files that a folder held at any moment, counted without the store's own code."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = self.looks = 0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            time.sleep(0.0005)

    def _look(self) -> None:
        self.looks += 1
        self.most = max(self.most, bytes_in(self._root))


def bytes_in(root: Path) -> int:
    total = 0
    for at, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(at, name)).st_size
    return total
