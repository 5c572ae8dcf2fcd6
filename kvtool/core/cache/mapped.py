"""Copying values out of LMDB's map by reading the file instead.

``get()`` into bytes touches every page of a value through the map: 1.3 to 70 times slower on a cold disk than one
``preadv``, and a SIGBUS where the file is shorter than it claims (STORE.md, facts 3 and 6). LMDB hands out a value's
address without touching it; minus the map's start that is its offset in ``data.mdb``, good as long as the transaction.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvtool.core.errors import DamagedError

_READ_FROM = 2048  # smaller values share their page with the tree, which the lookup has touched anyway
_ALIGN = 64


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview | bytearray) -> int:
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def aligned(size: int) -> memoryview:
    """A private writable buffer whose first byte stands on a 64-byte boundary."""
    block = bytearray(size + _ALIGN)
    start = -_address(block) % _ALIGN
    return memoryview(block)[start : start + size]


class MappedFile:
    """``data.mdb`` as a file and as a mapping of this process.

    Where the mapping cannot be found (not Linux), values are copied through the map, which is correct, only slower.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._start: int | None = None

    def close(self) -> None:
        """Close the file; the mapping is LMDB's."""
        os.close(self._handle)

    def is_file(self, status: os.stat_result) -> bool:
        """Whether this is its status."""
        return os.path.samestat(os.fstat(self._handle), status)

    def size(self) -> int:
        """Length of the file, now."""
        return os.fstat(self._handle).st_size

    def locate(self) -> None:
        """Find the mapping; again after every change of the map's size."""
        self._start = self._find()

    def _find(self) -> int | None:
        inode, path = os.fstat(self._handle).st_ino, os.path.realpath(self._path)
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
                for line in maps:
                    fields = line.rstrip("\n").split(maxsplit=5)
                    if len(fields) == 6 and fields[5] == path and int(fields[4]) == inode and not int(fields[2], 16):
                        return int(fields[0].split("-")[0], 16)
        except OSError:
            pass
        return None

    def _offset(self, view: memoryview) -> int | None:
        if self._start is None:
            return None
        offset, size = _address(view) - self._start, self.size()
        if not 0 <= offset <= size - view.nbytes:
            raise DamagedError("the index points outside the file")
        return offset

    def will_need(self, view: memoryview) -> None:
        """Ask the kernel to start reading a value."""
        if view.nbytes >= _READ_FROM and hasattr(os, "posix_fadvise"):
            offset = self._offset(view)
            if offset is not None:
                os.posix_fadvise(self._handle, offset, view.nbytes, os.POSIX_FADV_WILLNEED)

    def copy(self, view: memoryview) -> memoryview:
        """A private, writable copy of a value inside an open transaction.

        Raises
        ------
        DamagedError : the value lies outside the file.
        """
        offset = self._offset(view)
        if offset is None or view.nbytes < _READ_FROM:
            return memoryview(bytearray(view))
        target = aligned(view.nbytes)
        done = 0
        while done < target.nbytes:
            count = os.preadv(self._handle, [target[done:]], offset + done)
            if count <= 0:
                raise DamagedError("the file is shorter than it says")
            done += count
        return target
