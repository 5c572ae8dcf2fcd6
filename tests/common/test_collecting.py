"""Garbage collection is paused, and its earlier state is restored afterwards."""

from __future__ import annotations

import gc

import pytest

from kvtool.core.common.collecting import kept_collection, paused_collection


def test_it_goes_on_as_it_was() -> None:
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), paused_collection():
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_whoever_ends_it_inside_has_it_back_behind() -> None:
    with kept_collection():
        gc.disable()
        with paused_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
