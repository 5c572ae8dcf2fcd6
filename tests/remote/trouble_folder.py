"""Faults of a folder: its mount disappears, refuses or hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.remote.backends import Scene

Make = Callable[[Scene], object]


def unmounted(scene: Scene) -> None:
    aside = scene.site.folder.with_name("aside")
    scene.site.folder.rename(aside)
    scene.later.callback(aside.rename, scene.site.folder)


def _before_reads(scene: Scene, what: Callable[[], object]) -> None:
    real = os.pread

    def pread(*given: Any) -> bytes:
        what()
        return real(*given)

    scene.patch.setattr(os, "pread", pread)


def _raising(error: int) -> Callable[..., Any]:
    def fail(*given: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def counted(scene: Scene, reads: list[int]) -> None:
    _before_reads(scene, lambda: reads.append(reads.pop() + 1))


def from_the_middle_on(then: Callable[[Scene], object]) -> Make:
    def make(scene: Scene) -> None:
        left = [int(scene.middle)]

        def count() -> None:
            left[0] -= 1
            if left[0] == 0:
                then(scene)

        _before_reads(scene, count)

    return make


def failing(error: int, of: Callable[[int], bool] = lambda flags: True) -> Make:
    def make(scene: Scene) -> None:
        real = os.open

        def opened(path: Any, flags: int, *given: Any, **more: Any) -> int:
            inside = more.get("dir_fd") is not None or str(path).startswith(str(scene.site.folder))
            if inside and of(flags):
                raise OSError(error, os.strerror(error), str(path))
            return real(path, flags, *given, **more)

        scene.patch.setattr(os, "open", opened)

    return make


def reads_fail(error: int) -> Make:
    return lambda scene: scene.patch.setattr(os, "pread", _raising(error))


def hangs(scene: Scene) -> None:
    over, left = threading.Event(), [scene.middle]

    def wait() -> None:
        left[0] -= 1
        if left[0] <= 0:
            over.wait(60)

    _before_reads(scene, wait)
    scene.later.callback(over.set)


def crawls(scene: Scene) -> None:
    _before_reads(scene, lambda: time.sleep(0.01))


def cannot_sync(error: int) -> Make:
    return lambda scene: scene.patch.setattr(os, "fsync", _raising(error))
