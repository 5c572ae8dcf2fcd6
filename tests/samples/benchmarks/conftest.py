"""The command tests' fixtures: stores of a tiny model."""

from tests.cli.working import built, corpus, fresh, store, tiny
from tests.compress.making import plain, plain_store

__all__ = ["built", "corpus", "fresh", "plain", "plain_store", "store", "tiny"]
