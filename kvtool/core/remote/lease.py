"""A push lets others see that it runs, so that none deletes what it counts on; and waits while one is deleting.

Who deletes shows that first and looks for pushes then; who pushes shows that first and looks for deletions then. So of
the two at least one sees the other: the deletion gives way, the push waits, and only then asks what is there already.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvtool.core.errors import KvtoolError
from kvtool.core.remote.blobs import LEASES, Blobs

_RENEWED_EVERY = min(LEASES.values()) / 4
_LOOK_EVERY = 0.1  # seconds, while another one deletes
_LONGER = 5.0  # seconds to wait for what should be over by then


class Lease:
    """The lease by which a running push is seen by others. Use `running`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._id = secrets.token_hex(8)
        self._renewed = float("-inf")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold it; entered when nobody else deletes."""
        self.renew()
        try:
            # Who deletes gives way at its next values. What stands when a dead one is over was held by a wrong clock.
            until = time.monotonic() + LEASES["sweep"] + _LONGER
            while self._others("sweep") and time.monotonic() < until:
                time.sleep(_LOOK_EVERY)
                self._hold("push")
            yield
        finally:
            self._release("push")

    def renew(self) -> None:
        """Go on holding it; to be called now and then."""
        if time.monotonic() - self._renewed > _RENEWED_EVERY:
            self._hold("push")

    @contextmanager
    def sweeping(self) -> Iterator[Callable[[], bool]]:
        """Show that something will be deleted. What is given tells, right before each deletion, whether it may be."""

        def alone() -> bool:
            self._hold("sweep")
            self._hold("push")
            return not self._others("push")

        self._hold("sweep")
        try:
            yield alone
        finally:
            self._release("sweep")

    def _hold(self, what: str) -> None:
        self._blobs.hold(f"{what}-{self._id}")
        self._renewed = time.monotonic()

    def _release(self, what: str) -> None:
        with suppress(KvtoolError):  # the tier is gone: it is over by itself
            self._blobs.release(f"{what}-{self._id}")

    def _others(self, what: str) -> bool:
        return any(name.startswith(f"{what}-") for name in self._blobs.held() - {f"{what}-{self._id}"})
