"""The shared fixtures of the command tests, and what the protocol's library brings."""

from __future__ import annotations

import pytest

from tests.cli.working import built, corpus, fresh, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
