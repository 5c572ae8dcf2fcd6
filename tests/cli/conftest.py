"""The shared fixtures of the command tests."""

from typing import Any

import pytest

from tests.cli.working import built, corpus, fresh, says, store, tiny
from tests.compress.making import fitted, fitted_store, plain, plain_store

__all__ = ["built", "corpus", "fitted", "fitted_store", "fresh", "plain", "plain_store", "says", "store", "tiny"]


@pytest.fixture(params=[(), ("--json",)], ids=["human", "json"])
def form(request: pytest.FixtureRequest) -> Any:
    """Errors look alike in both forms, plus an object on stdout in the second (`Done.failed`)."""
    return request.param
