"""The shared fixtures of the command tests."""

from tests.cli.working import built, corpus, fresh, says, store, tiny
from tests.compress.making import fitted, fitted_store, plain, plain_store

__all__ = ["built", "corpus", "fitted", "fitted_store", "fresh", "plain", "plain_store", "says", "store", "tiny"]
