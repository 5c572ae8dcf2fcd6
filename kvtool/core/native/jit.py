"""Just-in-time compilation of LLVM IR to machine code in this process, without a C compiler; its cache on disk.

Code that is read from the cache is run: so it is taken only from a folder of the user's own that nobody else can write
to, and only if its digest, which covers its source, is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvtool.core.common.files import cache_dir, make_folder, replace_file
from kvtool.core.common.machine import X86
from kvtool.core.common.plugins import install_line
from kvtool.core.errors import KvtoolError
from kvtool.core.native.builder import Fields, FunctionBuilder, Scope, Value
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


LINE = 64  # bytes of a cache line
_WORD = 8  # bytes of a field
JOBS = "i64* jobs, i64 number"  # arguments of a function that does several
_own = threading.local()
Packed: TypeAlias = "ctypes.Array[ctypes.c_int64]"


class Job:
    """Arguments of machine code in memory, 8 bytes each: "i64", "float", "ptr", or `TYPE*`, a pointer to such."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields
        self.places = {name: index for index, name in enumerate(fields)}
        self._words = struct.Struct("=" + "".join("f4x" if kind == "float" else "q" for kind in fields.values()))
        self._memory = ctypes.c_int64 * len(fields)

    def __len__(self) -> int:
        return len(self.fields)

    def load(self, k: FunctionBuilder, job: Value, first: int = 0) -> Fields:
        words = job.of("i64")
        items = enumerate(self.fields.items(), first)
        return Fields({name: words.at(index).of(kind).load(align=_WORD) for index, (name, kind) in items})

    @contextlib.contextmanager
    def each(self, k: FunctionBuilder) -> Iterator[Fields]:
        """Loop over the jobs of a function of `JOBS`, of which there is at least one."""
        with k.loop(k.args.number) as index:
            yield self.load(k, k.args.jobs.at(index * len(self)))

    def pack(self, **values: int | float) -> Packed:
        """Write one job to memory. Raises ValueError: a field is missing, or there is no such field."""
        if values.keys() != self.fields.keys():
            raise ValueError(f"a job has {', '.join(self.fields)}")
        packed = self._memory()
        self._words.pack_into(packed, 0, *[values[name] for name in self.fields])
        return packed


class WorkQueue(Scope):
    """Shares of a job's work, from `first` to before `last`; any number of threads take from one job."""

    def __init__(self, k: FunctionBuilder, taken: Value, share: Value | int, stop: Value):
        self._k, self._take, body, self._end = k, k.new_block(), k.new_block(), k.new_block()
        k.branch(self._take)
        k.begin_block(self._take)
        self.first = k.atomic_add(taken, share)
        k.branch(body, self.first.compare("slt", stop), self._end)
        k.begin_block(body)
        self.last = k.minimum(self.first + share, stop, signed=True)

    def close(self) -> None:
        self._k.branch(self._take)
        self._k.begin_block(self._end)

    def __enter__(self) -> WorkQueue:
        return self


class Jobs:
    """Several jobs of one kind in memory, field by field: each is set for all of them at once."""

    def __init__(self, job: Job, count: int) -> None:
        self._places = job.places
        self.words = np.zeros((count, len(job)), np.int64)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            self.words[:, self._places[name]] = value

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        self.words = np.ascontiguousarray(self.words[mask])

    def run(self, kernel: Callable[[int, int], None]) -> None:
        if len(self.words):
            kernel(address(self.words), len(self.words))


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def aligned(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin with a line of the cache: a load across two lines takes twice as long."""
    element = np.dtype(dtype)
    whole = np.zeros(count * element.itemsize + LINE, np.uint8)
    first = -address(whole) % LINE
    return whole[first : first + count * element.itemsize].view(element)


def scratch(name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """This thread's memory of that name, `[count]`, with any old content.

    To allocate it anew each time would take as long as what is computed in it.
    """
    element = np.dtype(dtype)
    memory: npt.NDArray[np.uint8] | None = getattr(_own, name, None)
    if memory is None or memory.nbytes < count * element.itemsize:
        memory = aligned(count * element.itemsize, np.uint8)
        setattr(_own, name, memory)
    return memory[: count * element.itemsize].view(element)


def has_triton() -> bool:
    """Return whether there is Triton; asked for at every layer, so looked for once."""
    return _found(importlib.util.find_spec)


@cache
def _found(find: Callable[[str], Any]) -> bool:
    return find("triton") is not None


def jit(kernel: Callable[..., None], *parts: Callable[..., Any], unspecialized: tuple[str, ...] = ()) -> Any:
    """Make a Triton kernel of a function whose module has `tl` only for type checkers, and of the functions it calls.

    Nothing imports triton before. Triton compiles one for each set of its constants; a caller keeps it. For 1 and
    multiples of 16 of `unspecialized` numbers no separate kernel is made. Raises KvtoolError: triton is missing.
    """
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import triton.language  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise KvtoolError("this kernel needs triton", install_line("triton")) from error
    names: dict[str, Any] = kernel.__globals__
    names["tl"] = triton.language
    for part in parts:
        names[part.__name__] = triton.jit(part)
    return triton.jit(do_not_specialize=list(unspecialized))(kernel)
