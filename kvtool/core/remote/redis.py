"""`redis://` and `rediss://`: blobs as strings in Redis or Valkey, by redis-py with hiredis."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis import exceptions as errors
from redis.connection import DefaultParser
from redis.utils import HIREDIS_AVAILABLE

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.common.urls import HIDDEN, SHOWN, for_people, is_host
from kvtool.core.errors import KvtoolError, NoSpaceError, RemoteError, UsageError
from kvtool.core.remote.blobs import AHEAD, LEASES, LEAST_RATE, MOST_NAMES, TIMEOUT, Backend, most_bytes, seconds_held

if not HIREDIS_AVAILABLE:  # whose parser is the default one then, and the one that is bounded
    raise ImportError("hiredis")

PREFIX = "kvtool"  # before every key; `?prefix=` in the URL names another
_LEASES = "push"  # the sorted set of what is held, by the server's time at which it is over
# Errors that redis-py and hiredis raise on malformed answers.
_STRANGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_SCANNED = 1000  # keys of one round of a scan
_NAMES_AT_ONCE = 1024  # in one round trip
_BYTES_AT_ONCE = 16 * 2**20


def from_url(url: str, timeout: float) -> RedisBlobs:
    parts = urlsplit(url)
    more = parts.path + parts.query
    if not is_host(parts.netloc.rpartition("@")[2]) or parts.fragment or url.count("@") > 1 or "@" in more:
        raise ValueError("a password that is not escaped would be taken for a host, and looked up")
    if not re.fullmatch(r"(/\d*)?/?", parts.path):  # redis-py would take the first one
        raise UsageError(f"{for_people(url)} names no database", "it is a number, such as redis://host:6379/0")
    if dict(parse_qsl(parts.query, keep_blank_values=True)).get("prefix") == "":
        raise UsageError(f"{for_people(url)} has an empty prefix", "leave ?prefix= out, or name one")
    return RedisBlobs(url, timeout)


class RedisBlobs(Backend):
    at_once, together, joined = 2, 64, 2**18  # more would share a slow line, and come too late

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        self._prefix = query.pop("prefix", PREFIX)
        self.url = for_people(url)
        self._secrets = _secrets_of(url)
        self._timeout = timeout
        self._bounds = Bounds(timeout)
        try:
            self._client: Any = redis.Redis.from_url(
                urlunsplit(parts._replace(query=urlencode(query))),
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=None,
                decode_responses=False,
                parser_class=partial(BoundedParser, bounds=self._bounds),
            )
            pool = self._client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # what the URL asks of a connection is checked here
        except (ValueError, TypeError):  # what it says repeats parts of the URL
            hint = "such as redis://host:6379/0; options of redis-py follow after `?`"
            raise UsageError(f"{self.url} is no Redis URL", hint) from None

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._each("strlen", names)

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._explained():
            waiting = self._client.pipeline(transaction=False)
            size = 0
            for name, value in values.items():
                waiting.set(self._key(name), value)
                size += len(value)
                if size >= _BYTES_AT_ONCE:
                    waiting.execute()
                    size = 0
            waiting.execute()

    def flush(self) -> None:
        """Do nothing: Redis persists as it is configured to."""

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        with self._explained(), self._client.pipeline() as watching:
            watching.watch(self._key(name))
            if watching.get(self._key(name)) != before:
                return False
            watching.multi()
            watching.set(self._key(name), after)
            try:
                watching.execute()
            except errors.WatchError:
                return False
            return True

    def names(self, below: str = "") -> Iterator[str]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in self._key(below)) + "*"
        cursor, rounds = 0, 0
        while rounds == 0 or cursor:
            rounds += 1
            with self._explained():
                cursor, found = self._client.scan(cursor, match=pattern, count=_SCANNED)
                names = [key.decode(errors="backslashreplace")[len(self._prefix) + 1 :] for key in found]
            yield from (name for name in names if name != _LEASES)
            if rounds * _SCANNED > MOST_NAMES:
                raise RemoteError(f"{self.url} lists names without an end", _CHECK)

    def delete(self, names: Sequence[str]) -> None:
        self._each("unlink", names)

    def hold(self, name: str) -> None:
        with self._explained():
            now, waiting = self._now(), self._client.pipeline()
            waiting.zremrangebyscore(self._key(_LEASES), "-inf", now)
            latest = now + max(LEASES.values()) + AHEAD  # see `leases_at`
            waiting.zremrangebyscore(self._key(_LEASES), latest, "+inf")
            waiting.zadd(self._key(_LEASES), {name: now + seconds_held(name)})
            waiting.execute()

    def held(self) -> set[str]:
        with self._explained():
            names = self._client.zrangebyscore(self._key(_LEASES), self._now(), "+inf")
            return {name.decode(errors="backslashreplace") for name in names}

    def release(self, name: str) -> None:
        with self._explained():
            self._client.zrem(self._key(_LEASES), name)

    def fetch(self, requests: Sequence[BlobRequest]) -> Iterator[tuple[int, bytes | None]]:
        """Send all commands in one round trip, and read the replies as they come."""
        commands, limits = list[tuple[str, str, int, int]](), list[int]()
        for name, most, pack, start in requests:
            limits.append(most if pack else min(most_bytes(name), most))
            commands.append(("GETRANGE", self._key(pack or name), start, start + limits[-1] - bool(pack)))
        left, pool = len(commands), self._client.connection_pool
        with self._explained():
            connection = pool.get_connection()
        try:
            with self._explained():
                connection.send_packed_command(connection.pack_commands(commands))
            for number, most in enumerate(limits):
                with self._explained(), self._bounds.of(most):
                    value = _read_value(connection, most)
                left -= 1
                yield number, value
        finally:
            if left:  # replies are on their way that nobody reads
                connection.disconnect()
            pool.release(connection)

    def close(self) -> None:
        with suppress(Exception):  # it may be gone already
            self._client.close()

    def _each(self, command: str, names: Sequence[str]) -> list[int]:
        answers: list[int] = []
        with self._explained():
            for at in range(0, len(names), _NAMES_AT_ONCE):
                waiting = self._client.pipeline(transaction=False)
                for name in names[at : at + _NAMES_AT_ONCE]:
                    getattr(waiting, command)(self._key(name))
                answers += waiting.execute()
        if not all(type(answer) is int for answer in answers):
            raise RemoteError(f"{self.url} answers as no Redis does", _CHECK)
        return answers

    def _now(self) -> float:
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of redis-py into KvtoolErrors that repeat no secret."""
        try:
            yield
        except _STRANGE as error:
            raise RemoteError(f"{self.url} answers as no Redis does: {type(error).__name__}", _CHECK) from error
        except errors.RedisError as error:
            text = str(error).rstrip(".")  # a sentence, which is continued
            for secret in self._secrets:
                text = text.replace(secret, HIDDEN)
            text = text[-_MOST_SAID:]
            raise self._in_words(error, text) from (error if text == str(error).rstrip(".") else None)

    def _in_words(self, error: Exception, text: str) -> KvtoolError:
        lost = isinstance(error, errors.ConnectionError)
        refused = lost and ("auth" in text.lower() or "password" in text.lower())
        if refused or isinstance(error, errors.AuthenticationError | errors.NoPermissionError):
            return RemoteError(f"{self.url} refuses: {text}", "check user and password in the URL")
        if isinstance(error, errors.TimeoutError):
            return RemoteError(f"{self.url} did not answer within {self._timeout:g} s", _CHECK)
        if lost:
            return RemoteError(f"{self.url} cannot be reached: {text}", _CHECK)
        if isinstance(error, errors.OutOfMemoryError):
            return NoSpaceError(f"{self.url} is full", "raise its maxmemory, or push elsewhere")
        if isinstance(error, errors.ResponseError):
            said = text.rpartition("caused error: ")[2]  # a pipeline's error holds the whole command, values too
            return RemoteError(f"{self.url} refuses: {said}", _CHECK)
        return RemoteError(f"{self.url} failed: {text}", _CHECK)


_CHECK = "check the address and that the server runs"
_MOST_SAID = 1000  # characters of what a server says of an error


def _read_value(connection: Any, most: int) -> bytes | None:
    """Read the reply to a GETRANGE; b"": the key holds something else than a value of kvtool's."""
    try:
        value = connection.read_response()
    except errors.ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            return b""
        raise
    if type(value) is not bytes:
        raise TypeError(f"a reply of the type {type(value).__name__}")
    return _bounded(value, most)


def _bounded(value: bytes, most: int) -> bytes | None:
    """Return the reply of GETRANGE from 0 to `most`, or b"" if it has the one byte too many. An empty reply is None:
    Redis sends that for a missing value, and kvtool never stores an empty one."""
    return None if not value else value if len(value) <= most else b""


def _secrets_of(url: str) -> list[str]:
    """Return the secrets in a URL, escaped and not, longest first. They must not be repeated in messages."""
    parts = urlsplit(url)
    secrets = {parts.password or parts.username or ""} | {
        value for name, value in parse_qsl(parts.query) if name not in SHOWN
    }
    return sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True)


# ---- bounds on a reply: no more bytes than were asked for, and no slower than a usable line ----------------------

_PLAIN = 2**24  # bytes of an answer without a value of ours: 1000 names of a scan, a number, an error
_READ_AHEAD = 2**17  # bytes of later answers, which come with its end


class Bounds(threading.local):
    """The bounds of the next reply that a thread reads: its bytes, and the seconds without data."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.most = _PLAIN

    @contextmanager
    def of(self, most: int) -> Iterator[None]:
        before, self.most = self.most, max(most, _PLAIN)
        try:
            yield
        finally:
            self.most = before


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
    """hiredis' parser, which gives up an answer that is longer or slower than may be."""

    def __init__(self, socket_read_size: int, bounds: Bounds) -> None:
        super().__init__(socket_read_size)
        self._bounds = bounds
        self._begun, self._came = 0.0, 0

    def read_response(self, *given: Any, **more: Any) -> Any:
        self._begun, self._came = time.monotonic(), 0
        return super().read_response(*given, **more)

    def read_from_socket(self, *given: Any, **more: Any) -> Any:
        before = self._reader.len()
        done = super().read_from_socket(*given, **more)
        self._came += self._reader.len() - before
        seconds = time.monotonic() - self._begun
        if self._came > self._bounds.most + _READ_AHEAD:
            raise errors.InvalidResponse("an answer is longer than what was asked for")
        if seconds > self._bounds.timeout and self._came < seconds * LEAST_RATE:
            raise errors.TimeoutError("an answer comes too slowly")
        return done

    def handle_push_response(self, response: Any, **more: Any) -> Any:
        raise errors.InvalidResponse("it sends what nobody has asked for")
