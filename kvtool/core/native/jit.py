"""Just-in-time compilation of LLVM IR to machine code in this process, without a C compiler; its cache on disk.

Code that is read from the cache is run: so it is taken only from a folder of the user's own that nobody else can write
to, and only if its digest, which covers its source, is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import stat
import threading
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from kvtool.core.common.files import cache_dir, make_folder, replace_file
from kvtool.core.common.machine import X86
from kvtool.core.errors import KvtoolError
from kvtool.core.native.isa import Isa, best_isa, llvm

_OPTIMISATION = 2  # 3 takes as long and gives the same speed; 1 gives 10 % less
_CALLABLE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_engines: list[Any] = []  # own the machine code: never freed

R = TypeVar("R")
Kind = Callable[[Isa], str]  # LLVM IR of a function `run(jobs, number of jobs)`; equal ones are compiled once

_MOST_BYTES = 2**22  # of one piece of code
_MOST_FILES = 256
_DIGEST = 32
_FOR_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # which does not wait for the other end of a pipe


class Function:
    __slots__ = ("_call", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._call = _CALLABLE(address)

    def __call__(self, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> None:
        self._call(first, second, third, fourth)


def compiled(text: str, isa: Isa, *names: str) -> tuple[Function, ...]:
    """Compile functions of an LLVM IR module; the code lives as long as the process, and on disk for the next one.

    Raises RuntimeError: the text is not LLVM IR; KvtoolError: llvmlite cannot be imported.
    """
    binding = llvm()
    least = "x86-64" if platform.machine() in X86 else ""
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=isa.cpu or least, features=isa.extra, opt=_OPTIMISATION)
    versions = importlib.metadata.version("llvmlite"), ".".join(map(str, binding.llvm_version_info)), str(_OPTIMISATION)
    key = key_of(*versions, target.triple, isa.cpu or least, isa.extra, text)
    code = kept_code(key)
    if code is None:
        code = machine.emit_object(binding.parse_assembly(text))
        keep_code(key, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return tuple(Function(int(engine.get_function_address(name))) for name in names)


def compile_once(make: Callable[..., R]) -> Callable[..., R]:
    """Keep what a function compiles, by its arguments: a thread that asks meanwhile waits for the first one's."""
    memo, lock = cache(make), threading.Lock()

    @wraps(make)
    def once(*arguments: Any) -> R:
        with lock:
            return memo(*arguments)

    return once


def kernel(kind: Kind) -> Function:
    return kernel_for(best_isa(), kind)


@compile_once
def kernel_for(isa: Isa, kind: Kind) -> Function:
    return compiled(kind(isa), isa, "run")[0]


# ---- kept on disk ------------------------------------------------------------------------------------------------


def key_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def kept_code(key: str) -> bytes | None:
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        descriptor = os.open(folder / key, _FOR_READING)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(_MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) and _is_ours(status) else b""
    except OSError:
        return None
    code = data[_DIGEST:]
    return code if len(data) <= _MOST_BYTES and code and data[:_DIGEST] == _digest(key, code) else None


def keep_code(key: str, code: bytes) -> None:
    folder = _folder(make=True)
    if folder is None or len(code) + _DIGEST > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        _make_room(folder)
        replace_file(folder / key, _digest(key, code) + code)


def _folder(make: bool) -> Path | None:
    """None: it is missing, or another user may write to it."""
    try:
        folder = cache_dir() / "native"
        if make:
            make_folder(folder)
        status = os.lstat(folder)
    except (OSError, KvtoolError):
        return None
    return folder if stat.S_ISDIR(status.st_mode) and _is_ours(status) else None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _make_room(folder: Path) -> None:
    """Delete the oldest files: code of versions that are no longer installed."""
    files = [Path(entry.path) for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)]
    if len(files) >= _MOST_FILES:
        for path in sorted(files, key=lambda file: file.stat().st_mtime)[: _MOST_FILES // 2]:
            path.unlink(missing_ok=True)
