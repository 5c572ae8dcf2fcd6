"""Settings of the process while a model is loaded: garbage collection, and what `transformers` writes."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_settings = threading.RLock()


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause garbage collection while a model is imported and built: none of a million objects is garbage, and
    looking through them took a quarter of a question's processor time (samples/results/speed.md).
    """
    with kept_collection():
        gc.disable()
        yield


@contextmanager
def kept_collection() -> Iterator[None]:
    was = gc.isenabled()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `transformers` from showing progress bars, log lines and warnings inside; then restore its settings.

    One thread at a time enters: a process has one set of them, and one default dtype of torch, which loading changes.
    """
    from transformers.utils import logging

    with _settings, warnings.catch_warnings():
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
