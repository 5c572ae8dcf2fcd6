"""The keywords of the Python API are those that the rooms declare."""

from __future__ import annotations

import inspect

from kvtool.core import api


def test_notebooks_are_shown_the_options() -> None:
    shown = inspect.signature(api.Cache.query).parameters
    assert shown["ratio"].default == 0.15
    assert "options" not in shown
    assert "device" not in shown
