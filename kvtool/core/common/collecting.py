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
    (samples/results/commands.md).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
