"""The fixtures of a shared store's tests."""

import math

import pytest

from kvtool.core.query import streaming
from tests.remote.backends import behind, url  # noqa: F401
from tests.remote.object_stub import serve  # noqa: F401
from tests.remote.serving import blobs, no_packs, redis_server, redis_url, s3_server, s3_url, small_packs  # noqa: F401


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each chunk that is computed after streaming take ten seconds, and none be computed during it."""
    monkeypatch.setattr(streaming.Computing, "_pass", lambda self, text: 1.0 + 10.0 * len(text))
    monkeypatch.setattr(streaming, "_alone", lambda session, plan, speeds, number: math.inf)
