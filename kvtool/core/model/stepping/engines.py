"""One engine a model, made once: while a prompt is still being prefilled, or when it is first asked for."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvtool.core.common.switches import STEPPER, asked
from kvtool.core.model.stepping.native import Engine
from kvtool.core.model.trial import UnsupportedArchitecture
from kvtool.core.native.isa import best_isa

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

_engines: WeakKeyDictionary[Decoder, Future[Engine | str]] = WeakKeyDictionary()
_lock = threading.Lock()


def prepare(decoder: Decoder) -> None:
    """Begin to make a model's engine beside whatever comes next: 0.1 s of one core, most of it LLVM's."""
    if decoder.keeps_states:
        return
    future, is_new = _future(decoder)
    if is_new:  # no daemon: a process that ends waits for LLVM to be done
        threading.Thread(target=_make, args=(decoder, future), name="kvtool-stepper").start()


def engine_of(decoder: Decoder) -> Engine | str:
    """Return a model's engine, or the reason why it has none."""
    future, is_new = _future(decoder)
    if is_new:
        _make(decoder, future)
    return future.result()


def _future(decoder: Decoder) -> tuple[Future[Engine | str], bool]:
    with _lock:
        future = _engines.get(decoder)
        if future is not None:
            return future, False
        return _engines.setdefault(decoder, Future()), True


def _make(decoder: Decoder, future: Future[Engine | str]) -> None:
    try:
        future.set_result(_made(decoder))
    except BaseException as error:  # whoever waits for it is told
        future.set_exception(error)


def _made(decoder: Decoder) -> Engine | str:
    wanted, isa = asked(STEPPER), best_isa()
    if wanted == "torch":
        return f"{STEPPER} asks for it"
    if isa is None:
        return "there is no machine code here"
    try:
        return Engine(decoder, isa)
    except (UnsupportedArchitecture, RuntimeError) as error:  # RuntimeError: it cannot be compiled here
        return str(error)
