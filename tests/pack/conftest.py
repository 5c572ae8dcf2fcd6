"""The fixtures of the tests of packs."""

from tests.cli.working import tiny

__all__ = ["tiny"]
