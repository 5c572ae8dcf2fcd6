"""Every fault of a shared store, and how it is made on every backend, or why it cannot be: the table of the tests.

A row is a fault, a column a backend of `backends.py`. A cell is looked up by the backend's name, then by its kind
(`file`, `redis`, `http`), and is either what makes the fault or a sentence that says why it cannot happen."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from tests.remote import trouble_folder as folder
from tests.remote import trouble_http as http
from tests.remote import trouble_redis as redis
from tests.remote.backends import BACKENDS, READ_ONLY
from tests.remote.object_stub import Answer
from tests.remote.scene import Scene


class Cell(NamedTuple):
    """A fault on a backend, with a pattern of the error's message. `perhaps`: the error may be absent. `patience`:
    seconds for a value."""

    make: Callable[[Scene], object]
    said: str = ""
    perhaps: bool = False
    patience: float = 30.0


Row = Mapping[str, Cell | str]

_NO_STATUS = "there are no statuses: what it answers to is an errno, as in the rows that have one"
_NO_CHOICE = "it is told the bytes, and has no way to send others"
_SILENT = "nothing whole within|did not answer within"
_GONE = "cannot be reached|broke off"

READING: Mapping[str, Row] = {
    "nobody is there": {
        "file": Cell(folder.unmounted, "no store at"),
        "redis": Cell(http.refused, "cannot be reached"),
        "http": Cell(http.refused, "cannot be reached"),
    },
    "no such place there": {
        "file": "that is the folder, as in the row before",
        "redis": Cell(redis.no_database, "refuses"),
        "s3": Cell(http.answers(404, "NoSuchBucket"), "no bucket or container"),
        "gs": Cell(http.answers(404, "NoSuchBucket"), "no bucket or container"),
        "az": Cell(http.answers(404, "ContainerNotFound"), "no bucket or container"),
        "web": Cell(http.answers(404), "no store at"),
    },
    "who asks is not known": {
        "file": "the system knows everybody: as in the next row",
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
    "clocks differ": {
        "file": "no request is signed",
        "redis": "no request is signed",
        "http": Cell(http.answers(403, "RequestTimeTooSkewed"), "refuses: 403 RequestTimeTooSkewed"),
        "web": "no request is signed",
    },
    "it is too busy": {
        "file": _NO_STATUS,
        "redis": Cell(redis.is_busy, "refuses: BUSY"),
        "http": Cell(http.answers(503, "SlowDown", Retry_After="1"), "is busy: 503 SlowDown"),
    },
    "too many requests": {
        "file": _NO_STATUS,
        "redis": "it has no such answer: who asks too much waits",
        "http": Cell(http.answers(429, "TooManyRequests"), "is busy: 429 TooManyRequests"),
    },
    "too many requests, once": {
        "file": _NO_STATUS,
        "redis": "it has no such answer: who asks too much waits",
        "http": Cell(http.once(Answer(429, http.error("SlowDown"), {"Retry-After": "0"}))),
    },
    "it fails": {
        "file": Cell(folder.reads_fail(errno.EIO), "cannot be read: Input/output error"),
        "redis": Cell(redis.holds_another_type, "refuses: WRONGTYPE"),
        "http": Cell(http.answers(500, "InternalError"), "failed: 500 InternalError"),
    },
    "it fails once": {
        "file": "a failed read is not made again: the system has tried already",
        "redis": "its errors are of what is asked, and come again",
        "http": Cell(http.once(Answer(500, http.error("InternalError")))),
    },
    "a name that is stale": {
        "file": Cell(folder.failing(errno.ESTALE), "cannot be read: Stale file handle"),
        "redis": "names are looked up at each request",
        "http": "names are looked up at each request",
    },
    "dies in the middle": {
        "file": Cell(folder.from_the_middle_on(folder.unmounted), perhaps=True),
        "redis": Cell(http.dies, _GONE),
        "http": Cell(http.dies, _GONE, perhaps=True),  # all of it may be on its way by then: here and below
    },
    "breaks off once": {
        "file": "it is no line",
        "redis": Cell(http.breaks, _GONE),
        "http": Cell(http.breaks, _GONE, perhaps=True),  # a request that has not begun is made again
    },
    "half an answer": {
        "file": "a file that is too short is damaged, as among the values",
        "redis": "answers say their length first: as in the row before",
        "http": Cell(http.cut_off, _GONE, perhaps=True),
    },
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
    "closes the line without a word": {
        "file": "it is no line",
        "redis": "as the row of what breaks off",
        "http": Cell(http.says_nothing, _GONE),
    },
    "it is elsewhere": {
        "file": "a link in the folder's place is the user's own, and followed",
        "redis": "a cluster is not spoken with: it refuses, as any other error",
        "http": Cell(http.answers(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), "is elsewhere"),
    },
    "the way there leads over another": {
        "file": "a link in the folder's place is the user's own, and followed",
        "redis": "it knows no such answer",
        "http": Cell(http.sent_elsewhere),
        "s3": Cell(http.sent_elsewhere, "refuses: 403"),  # a signature is for one host, and is not sent to another
    },
    "parts are ignored": {
        "file": _NO_CHOICE,
        "redis": _NO_CHOICE,
        "http": Cell(http.ignores_parts, "gives whole values only"),
    },
    "another program answers": {
        "file": "nobody answers but the system",
        "redis": Cell(redis.is_none, "failed: Protocol error"),
        "http": Cell(
            http.answers(200, body=b"<html>Please log in.</html>", Content_Type="text/html"),
            "answers as no such service does|head cannot be read",
        ),
    },
}

SENDING: Mapping[str, Row] = {
    "it is full": {
        "file": Cell(folder.cannot_sync(errno.ENOSPC), "is full"),
        "redis": Cell(redis.is_full, "is full"),
        "http": Cell(http.answers(507, "InsufficientStorage", which=http.is_write), "is full"),
        **READ_ONLY,
    },
    "who sends may only read": {
        "file": Cell(
            folder.failing(errno.EROFS, lambda flags: bool(flags & (os.O_WRONLY | os.O_RDWR))),
            "cannot be written: Read-only file system",
        ),
        "redis": Cell(redis.allows_no("set"), "refuses"),
        "http": Cell(http.answers(403, "AccessDenied", which=http.is_write), "refuses: 403 AccessDenied"),
        **READ_ONLY,
    },
    "it fails when it is written": {
        "file": Cell(folder.cannot_sync(errno.EIO), "cannot be written: Input/output error"),
        "redis": "that is its disk's matter, of which it tells nobody who writes",
        "http": Cell(http.answers(500, "InternalError", which=http.is_write), "failed: 500 InternalError"),
        **READ_ONLY,
    },
    "it fails once when it is written": {
        "file": "a failed write is not made again: the system has tried already",
        "redis": "its errors are of what is asked, and come again",
        "http": Cell(http.once(Answer(503, http.error("SlowDown")))),
        **READ_ONLY,
    },
    "it is gone when it is written": {
        "file": "what is not there is made: a mount that is gone is a folder like any other",
        "redis": Cell(http.refused, "cannot be reached"),
        "http": Cell(http.refused, "cannot be reached"),
        **READ_ONLY,
    },
}

_ONLY_FILES = "values are bytes of the server's, and nothing else can have their name"
_ITS_FILES = "what its server makes of such a file is its own matter"

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
FILES: Mapping[str, Row] = {
    kind: {
        "file": Cell(partial(folder.in_the_way, kind=kind)),
        "redis": _ONLY_FILES,
        "http": _ONLY_FILES,
        "web": _ITS_FILES,
    }
    for kind in ("fifo", "device", "link", "socket", "folder", "huge")
}


def cell_of(row: Row, name: str) -> Cell | str:
    """Raises KeyError if the table has none."""
    return row[name] if name in row else row[BACKENDS[name].kind]


def cells(table: Mapping[str, Row]) -> list[ParameterSet]:
    return [
        pytest.param(name, cell, id=f"{name}-{fault}")
        for name in BACKENDS
        for fault, row in table.items()
        if isinstance(cell := cell_of(row, name), Cell)
    ]
