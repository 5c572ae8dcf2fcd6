"""Garbage collection, paused while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let nobody look for garbage inside.

    Importing torch and transformers and building a model makes a million objects of which none is garbage, and Python
    looks through all of them again and again: a quarter of the processor time of one question from a shell
    (samples/results/commands.md). The first look behind it goes through all of them once, 0.1 s.
    """
    with kept_collection():
        gc.disable()
        yield


@contextmanager
def kept_collection() -> Iterator[None]:
    """Have garbage looked for afterwards if it was before, whatever is done inside."""
    was = gc.isenabled()
    try:
        yield
    finally:
        if was:
            gc.enable()
