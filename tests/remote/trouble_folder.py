"""Faults of a folder: its mount disappears, refuses or hangs, and its files are no regular files."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.remote.scene import Scene

Make = Callable[[Scene], object]


def unmounted(scene: Scene) -> None:
    aside = scene.folder.with_name("aside")
    scene.folder.rename(aside)
    scene.later.callback(aside.rename, scene.folder)


def counted(scene: Scene, reads: list[int]) -> None:
    real = os.pread

    def pread(*given: Any) -> bytes:
        reads[0] += 1
        return real(*given)

    scene.patch.setattr(os, "pread", pread)


def from_the_middle_on(then: Callable[[Scene], object]) -> Make:
    def make(scene: Scene) -> None:
        left, real = [int(scene.middle)], os.pread

        def pread(*given: Any) -> bytes:
            left[0] -= 1
            if left[0] == 0:
                then(scene)
            return real(*given)

        scene.patch.setattr(os, "pread", pread)

    return make


def failing(error: int, of: Callable[[int], bool] = lambda flags: True) -> Make:
    def make(scene: Scene) -> None:
        real = os.open

        def opened(path: Any, flags: int, *given: Any, **more: Any) -> int:
            inside = more.get("dir_fd") is not None or str(path).startswith(str(scene.folder))
            if inside and of(flags):
                raise OSError(error, os.strerror(error), str(path))
            return real(path, flags, *given, **more)

        scene.patch.setattr(os, "open", opened)

    return make


def reads_fail(error: int) -> Make:
    def make(scene: Scene) -> None:
        def pread(*given: Any) -> bytes:
            raise OSError(error, os.strerror(error))

        scene.patch.setattr(os, "pread", pread)

    return make


def hangs(scene: Scene) -> None:
    over, real, left = threading.Event(), os.pread, [scene.middle]

    def pread(*given: Any) -> bytes:
        left[0] -= 1
        if left[0] <= 0:
            over.wait(60)
        return real(*given)

    scene.patch.setattr(os, "pread", pread)
    scene.later.callback(over.set)


def crawls(scene: Scene) -> None:
    real, over = os.pread, threading.Event()

    def pread(*given: Any) -> bytes:
        over.wait(0.01)
        return real(*given)

    scene.patch.setattr(os, "pread", pread)
    scene.later.callback(over.set)


def cannot_sync(error: int) -> Make:
    def make(scene: Scene) -> None:
        def fsync(handle: int) -> None:
            raise OSError(error, os.strerror(error))

        scene.patch.setattr(os, "fsync", fsync)

    return make


def in_the_way(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may not be long
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
