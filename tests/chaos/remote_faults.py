"""Faults of a shared store, how each is made on every backend, and the table of both.

A row is a fault, a column a backend of `tests/remote/backends.py`. A cell is looked up by the backend's name, then by
its kinds. Without one the fault cannot happen there: a folder has no line that breaks and no statuses, and Redis has no
redirects, says the length of an answer first and asks for no signatures."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from _pytest.mark import ParameterSet

from kvtool.core.errors import EXIT_DAMAGED, EXIT_DONE, EXIT_FAILED, EXIT_NO_SPACE, EXIT_NO_STORE
from tests.remote.backends import BACKENDS, Scene
from tests.remote.object_stub import BREAK, Answer, GoogleServer, Request
from tests.remote.serving import Link

Make = Callable[[Scene], object]
Which = Callable[[Request], bool]

# ---- a folder: its mount disappears, refuses or hangs ----


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


def count_reads(scene: Scene, reads: list[int]) -> None:
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


def opening_fails(error: int, of: Callable[[int], bool] = lambda flags: True) -> Make:
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


def reads_hang(scene: Scene) -> None:
    over, left = threading.Event(), [scene.middle]

    def wait() -> None:
        left[0] -= 1
        if left[0] <= 0:
            over.wait(60)

    _before_reads(scene, wait)
    scene.later.callback(over.set)


def reads_crawl(scene: Scene) -> None:
    _before_reads(scene, lambda: time.sleep(0.01))


def cannot_sync(error: int) -> Make:
    return lambda scene: scene.patch.setattr(os, "fsync", _raising(error))


# ---- an HTTP service: its answers ----


def error_body(code: str) -> bytes:
    """Return an error as services word one; it repeats what must not be passed on."""
    return f"<Error><Code>{code}</Code><Message>AKIAZQXWVA zqxwvb</Message></Error>".encode()


def is_record(request: Request) -> bool:
    return "/pack/" in request.path.replace("%2F", "/") or "/kv/kv/" in request.path


def is_write(request: Request) -> bool:
    return request.method not in ("GET", "HEAD")


def answers(status: int, code: str = "", body: bytes = b"", which: Which = lambda request: True, **more: str) -> Make:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    answer = Answer(status, body or error_body(code), headers)

    def make(scene: Scene) -> None:
        scene.patch.setattr(scene.site.way, "trouble", lambda request: answer if which(request) else None)

    return make


def in_the_middle(status: int, code: str) -> Make:
    def make(scene: Scene) -> None:
        seen: list[Request] = []

        def answer(request: Request) -> Answer | None:
            seen.extend([request] * is_record(request))
            return Answer(status, error_body(code)) if len(seen) > 1 else None

        scene.patch.setattr(scene.site.way, "trouble", answer)

    return make


def once(answer: Answer) -> Make:
    def make(scene: Scene) -> None:
        seen: set[str] = set()

        def first(request: Request) -> Answer | None:
            kind = unquote(request.path).split("/")[-2]
            is_new = kind not in seen
            seen.add(kind)
            return answer if is_new else None

        scene.patch.setattr(scene.site.way, "trouble", first)

    return make


def cut_off(scene: Scene) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Answer | None:
        if not is_record(request) or seen:
            return None
        seen.append(request)
        whole = scene.site.way.forwarded(request)
        headers = {**whole.headers, "Content-Length": str(len(whole.body)), "Connection": "close"}
        return Answer(whole.status, whole.body[: len(whole.body) // 2], headers)

    scene.patch.setattr(scene.site.way, "trouble", answer)


def ignores_parts(scene: Scene) -> None:
    def answer(request: Request) -> Answer | None:
        headers = {name: value for name, value in request.headers.items() if name not in ("range", "x-ms-range")}
        return scene.site.way.forwarded(request._replace(headers=headers))

    scene.patch.setattr(scene.site.way, "trouble", answer)


def sent_elsewhere(scene: Scene) -> None:
    """Redirect to the server itself, as web servers do with folders that have moved."""

    def answer(request: Request) -> Answer:
        return Answer(307, headers={"Location": f"http://127.0.0.1:{scene.site.port}{request.target}"})

    scene.patch.setattr(scene.site.way, "trouble", answer)


def says_nothing(scene: Scene) -> None:
    scene.patch.setattr(scene.site.way, "trouble", lambda request: BREAK)


# ---- the line of any server ----


def refused(scene: Scene) -> None:
    scene.later.callback(scene.link.heal)
    scene.link.close()


def _in_the_middle_of_the_line(then: Callable[[Link], None]) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        link = scene.link
        scene.later.callback(link.heal)
        link.after(scene.middle, lambda: then(link))

    return make


dies = _in_the_middle_of_the_line(Link.close)
breaks = _in_the_middle_of_the_line(Link.heal)
stops = _in_the_middle_of_the_line(Link.stop)
crawls = _in_the_middle_of_the_line(Link.crawl)


# ---- a Redis ----


def redis_client(scene: Scene) -> Any:
    import redis

    made = redis.Redis(port=scene.site.port, socket_timeout=30)
    scene.later.callback(made.close)
    return made


def _key(scene: Scene, name: str) -> str:
    return f"{urlsplit(scene.site.url).query.removeprefix('prefix=')}/{name}"


def wants_a_password(scene: Scene) -> None:
    there = redis_client(scene)
    there.config_set("requirepass", "zqxwva")
    scene.later.callback(there.config_set, "requirepass", "")


def allows_no(command: str) -> Make:
    def make(scene: Scene) -> None:
        there = redis_client(scene)
        there.execute_command("ACL", "SETUSER", "default", f"-{command}")
        scene.later.callback(there.execute_command, "ACL", "SETUSER", "default", f"+{command}")

    return make


def rights_end(scene: Scene) -> None:
    there, mine = redis_client(scene), ("ACL", "SETUSER", "default")
    scene.later.callback(there.execute_command, *mine, "+getrange")
    scene.link.after(scene.middle, lambda: there.execute_command(*mine, "-getrange"))


def no_database(scene: Scene) -> None:
    scene.patch.setattr(scene.site, "url", scene.site.url.replace("/0?", "/99?"))


def redis_is_busy(scene: Scene) -> None:
    import redis

    there, script = redis_client(scene), redis_client(scene)
    there.config_set("busy-reply-threshold", 1)

    def run() -> None:
        with suppress(redis.RedisError):
            script.eval("while true do end", 0)

    def end() -> None:
        there.script_kill()
        running.join(30)
        there.config_set("busy-reply-threshold", 5000)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    scene.later.callback(end)
    while True:
        try:
            there.ping()
            time.sleep(0.001)
        except redis.ResponseError:
            return


def holds_another_type(scene: Scene) -> None:
    """Give the name of the head to another user's list."""
    there, name = redis_client(scene), _key(scene, "head")
    there.rename(name, name + "-aside")
    there.lpush(name, "mine")
    scene.later.callback(there.rename, name + "-aside", name)
    scene.later.callback(there.delete, name)


def another_program(scene: Scene) -> None:
    web = GoogleServer()
    scene.later.callback(web.close)
    scene.patch.setattr(scene.link, "_to", web.port)


def redis_is_full(scene: Scene) -> None:
    there = redis_client(scene)
    there.config_set("maxmemory", 1)
    scene.later.callback(there.config_set, "maxmemory", 0)


# ---- the table ----


class Cell(NamedTuple):
    """A fault on a backend. `code`: the exit code, or those it may be; 0: it is survived. `status`: words of the
    server, which the error repeats. `perhaps`: the error may be absent. `patience`: seconds for a value."""

    make: Callable[[Scene], object]
    code: int | tuple[int, ...] = EXIT_DONE
    status: str = ""
    perhaps: bool = False
    patience: float = 30.0


Table = Mapping[str, Mapping[str, Cell]]

_UNREACHED = Cell(refused, EXIT_FAILED)

READING: Table = {
    "nobody is there": {"file": Cell(unmounted, EXIT_NO_STORE), "redis": _UNREACHED, "http": _UNREACHED},
    "no such place there": {
        "redis": Cell(no_database, EXIT_FAILED),
        "az": Cell(answers(404, "ContainerNotFound"), EXIT_FAILED),
        "bucket": Cell(answers(404, "NoSuchBucket"), EXIT_FAILED),
        "web": Cell(answers(404), EXIT_NO_STORE),
    },
    "who asks is not known": {
        "redis": Cell(wants_a_password, EXIT_FAILED),
        "http": Cell(answers(401, "AccessDenied"), EXIT_FAILED, "401 AccessDenied"),
    },
    "who asks may not": {
        "file": Cell(opening_fails(errno.EACCES), EXIT_FAILED, "Permission denied"),
        "redis": Cell(allows_no("getrange"), EXIT_FAILED),
        "http": Cell(answers(403, "AccessDenied"), EXIT_FAILED, "403 AccessDenied"),
    },
    "rights end in the middle": {
        "file": Cell(from_the_middle_on(opening_fails(errno.EACCES)), EXIT_FAILED, "Permission denied"),
        "redis": Cell(rights_end, EXIT_FAILED, perhaps=True),  # all that is wanted may be asked for already
        "http": Cell(in_the_middle(403, "ExpiredToken"), EXIT_FAILED, "403 ExpiredToken"),
    },
    "clocks differ": {"bucket": Cell(answers(403, "RequestTimeTooSkewed"), EXIT_FAILED, "403 RequestTimeTooSkewed")},
    "it is too busy": {
        "redis": Cell(redis_is_busy, EXIT_FAILED, "BUSY"),
        "http": Cell(answers(503, "SlowDown", Retry_After="1"), EXIT_FAILED, "503 SlowDown"),
    },
    "too many requests": {"http": Cell(answers(429, "TooManyRequests"), EXIT_FAILED, "429 TooManyRequests")},
    "too many requests, once": {"http": Cell(once(Answer(429, error_body("SlowDown"), {"Retry-After": "0"})))},
    "it fails": {
        "file": Cell(reads_fail(errno.EIO), EXIT_FAILED, "Input/output error"),
        "redis": Cell(holds_another_type, EXIT_DAMAGED, "cannot be read"),
        "http": Cell(answers(500, "InternalError"), EXIT_FAILED, "500 InternalError"),
    },
    "it fails once": {"http": Cell(once(Answer(500, error_body("InternalError"))))},
    "a name that is stale": {"file": Cell(opening_fails(errno.ESTALE), EXIT_FAILED, "Stale file handle")},
    "dies in the middle": {
        "file": Cell(from_the_middle_on(unmounted), perhaps=True),
        "redis": Cell(dies, EXIT_FAILED),
        "http": Cell(dies, EXIT_FAILED, perhaps=True),  # all of it may be on its way by then: here and below
    },
    "breaks off once": {
        "redis": Cell(breaks, EXIT_FAILED),
        "http": Cell(breaks, EXIT_FAILED, perhaps=True),  # a request that has not begun is made again
    },
    "half an answer": {"http": Cell(cut_off, EXIT_FAILED, perhaps=True)},
    "says nothing from the middle on": {
        "file": Cell(reads_hang, EXIT_FAILED, patience=0.4),
        "redis": Cell(stops, EXIT_FAILED, patience=0.4),
        "http": Cell(stops, EXIT_FAILED, perhaps=True, patience=0.4),
    },
    "crawls": {
        "file": Cell(reads_crawl),
        "redis": Cell(crawls, EXIT_FAILED, patience=0.4),
        "http": Cell(crawls, EXIT_FAILED, perhaps=True, patience=0.4),
    },
    "closes the line without a word": {"http": Cell(says_nothing, EXIT_FAILED)},
    "it is elsewhere": {"http": Cell(answers(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), EXIT_FAILED)},
    "the way there leads over another": {
        "http": Cell(sent_elsewhere),
        "s3": Cell(sent_elsewhere, EXIT_FAILED, "403"),  # a signature is for one host, and is not sent to another
    },
    "parts are ignored": {"http": Cell(ignores_parts, EXIT_FAILED)},
    "another program answers": {
        "redis": Cell(another_program, EXIT_FAILED),
        "http": Cell(
            answers(200, body=b"<html>Please log in.</html>", Content_Type="text/html"),
            (EXIT_FAILED, EXIT_DAMAGED),  # of a store that finds names, its head
        ),
    },
}

SENDING: Table = {  # not over the web, which can only be read
    "it is full": {
        "file": Cell(cannot_sync(errno.ENOSPC), EXIT_NO_SPACE),
        "redis": Cell(redis_is_full, EXIT_NO_SPACE),
        "bucket": Cell(answers(507, "InsufficientStorage", which=is_write), EXIT_NO_SPACE),
    },
    "who sends may only read": {
        "file": Cell(
            opening_fails(errno.EROFS, lambda flags: bool(flags & (os.O_WRONLY | os.O_RDWR))),
            EXIT_FAILED,
        ),
        "redis": Cell(allows_no("set"), EXIT_FAILED),
        "bucket": Cell(answers(403, "AccessDenied", which=is_write), EXIT_FAILED, "403 AccessDenied"),
    },
    "it fails when it is written": {
        "file": Cell(cannot_sync(errno.EIO), EXIT_FAILED, "Input/output error"),
        "bucket": Cell(answers(500, "InternalError", which=is_write), EXIT_FAILED, "500 InternalError"),
    },
    "it fails once when it is written": {"bucket": Cell(once(Answer(503, error_body("SlowDown"))))},
    "it is gone when it is written": {"redis": _UNREACHED, "bucket": _UNREACHED},
}

# A value's replacement, made of it and of another one of its kind; None: nothing. Any backend holds bytes.
Harm = Callable[[bytes, bytes], bytes | None]
VALUES: Mapping[str, Harm] = {
    "gone": lambda value, other: None,
    "empty": lambda value, other: b"",
    "cut off": lambda value, other: value[:-7],
    "flipped": lambda value, other: value[:-50] + bytes([value[-50] ^ 4]) + value[-49:],
    "another's": lambda value, other: other,
    "something else": lambda value, other: b"<html>" * (len(value) // 6 + 1),
    "too large": lambda value, other: value[:-1] + bytes(2**20),
}


def cells(table: Table) -> list[ParameterSet]:
    return [
        pytest.param(name, next(row[kind] for kind in backend.kinds if kind in row), id=f"{name}-{fault}")
        for name, backend in BACKENDS.items()
        for fault, row in table.items()
        if {*backend.kinds} & row.keys()
    ]
