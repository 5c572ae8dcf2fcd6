from tests.cli.working import tiny
from tests.compress.making import fitted, fitted_store, plain, plain_store

__all__ = ["fitted", "fitted_store", "plain", "plain_store", "tiny"]
