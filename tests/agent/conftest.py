"""What the protocol's library brings."""

from __future__ import annotations

import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
