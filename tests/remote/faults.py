"""Every fault of a shared store, and how it is made on every backend: the table of the tests.

A row is a fault, a column a backend of `backends.py`. A cell is looked up by the backend's name, then by its kinds.
Without one the fault cannot happen there: a folder has no line that breaks and no statuses, and Redis has no redirects,
says the length of an answer first and asks for no signatures."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from tests.remote import trouble_folder as folder
from tests.remote import trouble_http as http
from tests.remote import trouble_redis as redis
from tests.remote.backends import BACKENDS, Scene
from tests.remote.object_stub import Answer


class Cell(NamedTuple):
    """A fault on a backend, with a pattern of the error's message. `perhaps`: the error may be absent. `patience`:
    seconds for a value."""

    make: Callable[[Scene], object]
    said: str = ""
    perhaps: bool = False
    patience: float = 30.0


Table = Mapping[str, Mapping[str, Cell]]

_SILENT = "nothing whole within|did not answer within"
_GONE = "cannot be reached|broke off"
_UNREACHED = Cell(http.refused, "cannot be reached")

READING: Table = {
    "nobody is there": {"file": Cell(folder.unmounted, "no store at"), "redis": _UNREACHED, "http": _UNREACHED},
    "no such place there": {
        "redis": Cell(redis.no_database, "refuses"),
        "az": Cell(http.answers(404, "ContainerNotFound"), "no bucket or container"),
        "bucket": Cell(http.answers(404, "NoSuchBucket"), "no bucket or container"),
        "web": Cell(http.answers(404), "no store at"),
    },
    "who asks is not known": {
        "redis": Cell(redis.wants_a_password, "refuses"),
        "http": Cell(http.answers(401, "AccessDenied"), "refuses: 401 AccessDenied"),
    },
    "who asks may not": {
        "file": Cell(folder.failing(errno.EACCES), "cannot be read: Permission denied"),
        "redis": Cell(redis.allows_no("getrange"), "refuses"),
        "http": Cell(http.answers(403, "AccessDenied"), "refuses: 403 AccessDenied"),
    },
    "rights end in the middle": {
        "file": Cell(folder.from_the_middle_on(folder.failing(errno.EACCES)), "cannot be read: Permission denied"),
        "redis": Cell(redis.rights_end, "refuses", perhaps=True),  # all that is wanted may be asked for already
        "http": Cell(http.in_the_middle(403, "ExpiredToken"), "refuses: 403 ExpiredToken"),
    },
    "clocks differ": {"bucket": Cell(http.answers(403, "RequestTimeTooSkewed"), "refuses: 403 RequestTimeTooSkewed")},
    "it is too busy": {
        "redis": Cell(redis.is_busy, "refuses: BUSY"),
        "http": Cell(http.answers(503, "SlowDown", Retry_After="1"), "is busy: 503 SlowDown"),
    },
    "too many requests": {"http": Cell(http.answers(429, "TooManyRequests"), "is busy: 429 TooManyRequests")},
    "too many requests, once": {"http": Cell(http.once(Answer(429, http.error("SlowDown"), {"Retry-After": "0"})))},
    "it fails": {
        "file": Cell(folder.reads_fail(errno.EIO), "cannot be read: Input/output error"),
        "redis": Cell(redis.holds_another_type, "refuses: WRONGTYPE"),
        "http": Cell(http.answers(500, "InternalError"), "failed: 500 InternalError"),
    },
    "it fails once": {"http": Cell(http.once(Answer(500, http.error("InternalError"))))},
    "a name that is stale": {"file": Cell(folder.failing(errno.ESTALE), "cannot be read: Stale file handle")},
    "dies in the middle": {
        "file": Cell(folder.from_the_middle_on(folder.unmounted), perhaps=True),
        "redis": Cell(http.dies, _GONE),
        "http": Cell(http.dies, _GONE, perhaps=True),  # all of it may be on its way by then: here and below
    },
    "breaks off once": {
        "redis": Cell(http.breaks, _GONE),
        "http": Cell(http.breaks, _GONE, perhaps=True),  # a request that has not begun is made again
    },
    "half an answer": {"http": Cell(http.cut_off, _GONE, perhaps=True)},
    "says nothing from the middle on": {
        "file": Cell(folder.hangs, _SILENT, patience=0.4),
        "redis": Cell(http.stops, _SILENT, patience=0.4),
        "http": Cell(http.stops, _SILENT, perhaps=True, patience=0.4),
    },
    "crawls": {
        "file": Cell(folder.crawls),
        "redis": Cell(http.crawls, _SILENT, patience=0.4),
        "http": Cell(http.crawls, _SILENT, perhaps=True, patience=0.4),
    },
    "closes the line without a word": {"http": Cell(http.says_nothing, _GONE)},
    "it is elsewhere": {
        "http": Cell(http.answers(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), "is elsewhere")
    },
    "the way there leads over another": {
        "http": Cell(http.sent_elsewhere),
        "s3": Cell(http.sent_elsewhere, "refuses: 403"),  # a signature is for one host, and is not sent to another
    },
    "parts are ignored": {"http": Cell(http.ignores_parts, "gives whole values only")},
    "another program answers": {
        "redis": Cell(redis.is_none, "failed: Protocol error"),
        "http": Cell(
            http.answers(200, body=b"<html>Please log in.</html>", Content_Type="text/html"),
            "answers as no such service does|head cannot be read",
        ),
    },
}

SENDING: Table = {  # not over the web, which can only be read
    "it is full": {
        "file": Cell(folder.cannot_sync(errno.ENOSPC), "is full"),
        "redis": Cell(redis.is_full, "is full"),
        "bucket": Cell(http.answers(507, "InsufficientStorage", which=http.is_write), "is full"),
    },
    "who sends may only read": {
        "file": Cell(
            folder.failing(errno.EROFS, lambda flags: bool(flags & (os.O_WRONLY | os.O_RDWR))),
            "cannot be written: Read-only file system",
        ),
        "redis": Cell(redis.allows_no("set"), "refuses"),
        "bucket": Cell(http.answers(403, "AccessDenied", which=http.is_write), "refuses: 403 AccessDenied"),
    },
    "it fails when it is written": {
        "file": Cell(folder.cannot_sync(errno.EIO), "cannot be written: Input/output error"),
        "bucket": Cell(http.answers(500, "InternalError", which=http.is_write), "failed: 500 InternalError"),
    },
    "it fails once when it is written": {"bucket": Cell(http.once(Answer(503, http.error("SlowDown"))))},
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
