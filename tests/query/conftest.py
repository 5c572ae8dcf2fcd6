from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.session.session import Session


@pytest.fixture
def cache(store: Path) -> Iterator[kvtool.Cache]:
    with kvtool.open(store) as opened:
        yield opened


@pytest.fixture
def session(store: Path) -> Iterator[Session]:
    with Store.open(store) as opened:
        yield Session.open(opened)
