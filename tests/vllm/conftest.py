"""The stores of the command tests."""

from tests.cli.working import built, store, tiny

__all__ = ["built", "store", "tiny"]
