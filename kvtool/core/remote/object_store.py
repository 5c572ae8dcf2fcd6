"""`s3://`, `gs://`, `az://`, and `https://` to read only: blobs as objects, by obstore."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.urls import for_people, is_host
from kvtool.core.errors import KvtoolError, NoSpaceError, RemoteError, UsageError
from kvtool.core.remote.blobs import LEAST_RATE, MOST_NAMES, TIMEOUT, leases_at, most_bytes

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore

_LEASES = "push"  # the folder of what is held
_RESOLUTION = 1.0  # seconds, of an object's time
_AT_ONCE = 16  # requests
_MANY = 100  # sizes, for which a folder is listed
_MOST_IN_ONE = 64 * 2**20  # bytes that are sent in one request
_PIECE = 64 * 2**10  # bytes of an answer that are worth a look

_T = TypeVar("_T")


def from_url(url: str, timeout: float) -> ObjectBlobs:
    return ObjectBlobs(address_of(url), for_people(url.rstrip("/")), timeout)


class ObjectBlobs:
    """The objects below a folder of a bucket. Lists are asked for what might be deleted, and for many sizes."""

    at_once, together, joined = 8, 1, 4 * 2**20

    def __init__(self, address: Address, url: str, timeout: float = TIMEOUT) -> None:
        self.url, self._address, self._timeout = url, address, timeout
        with self._explained():
            self._store = open_objects(address, timeout)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvtool-objects")

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return self._each(lambda name: self._value(name)[0], names)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Many of one folder are listed, a thousand in a request; missing ones are asked for."""
        folders, wanted = Counter(name.partition("/")[0] for name in names), {*names}
        many = [folder for folder, count in folders.items() if count > _MANY]
        listed = {one["path"]: one["size"] for folder in many for one in self._list(folder) if one["path"] in wanted}
        lacking = [name for name in names if name not in listed]
        listed |= dict(zip(lacking, self._sizes(lacking), strict=True))
        return [listed[name] for name in names]

    def _sizes(self, names: Sequence[str]) -> list[int]:
        def size(name: str) -> int:
            with suppress(FileNotFoundError), self._explained():
                return int(obstore.head(self._store, name)["size"])
            return 0

        return self._each(size, names)

    def put(self, values: Mapping[str, bytes]) -> None:
        def send(name: str) -> None:
            value = values[name]
            with self._changing():
                obstore.put(self._sending, name, value, use_multipart=len(value) > _MOST_IN_ONE)

        self._each(send, list(values))

    def flush(self) -> None:
        """Do nothing: an object is durable when it is acknowledged."""

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        value, meta = self._value(name)
        if value != before:
            return False
        known = (("e_tag", meta["e_tag"]), ("version", meta["version"])) if meta is not None else ()
        version = cast("UpdateVersion", {key: value for key, value in known if value is not None})
        with suppress(FileNotFoundError), self._changing():
            try:
                obstore.put(self._sending, name, after, mode=version or "create", use_multipart=False)
                return True
            except (AlreadyExistsError, PreconditionError):
                return False
            except BaseError as error:
                if status_of(str(error)) != 409:  # two at the same moment
                    raise
        return False

    def names(self, below: str = "") -> Iterator[str]:
        names = (found["path"] for found in self._list(below.rpartition("/")[0]))
        return (name for name in names if name.startswith(below) and not name.startswith(f"{_LEASES}/"))

    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        with self._changing():
            listed = 0
            for page in obstore.list(self._store, prefix=folder or None):
                yield from page
                listed += len(page)
                if listed > MOST_NAMES:
                    raise RemoteError(f"{self.url} lists names without an end", "check the address of the service")

    def delete(self, names: Sequence[str]) -> None:
        def one(name: str) -> None:
            with suppress(FileNotFoundError), self._changing():
                obstore.delete(self._sending, name)

        if names:
            try:
                with self._changing():
                    obstore.delete(self._sending, list(names))
            except FileNotFoundError:  # some services end at the first that is gone
                self._each(one, names)

    def hold(self, name: str) -> None:
        """The object's time counts, which the service sets."""
        self.put({f"{_LEASES}/{name}": b"1"})

    def held(self) -> set[str]:
        listed = self._list(_LEASES)
        times = {found["path"].removeprefix(f"{_LEASES}/"): found["last_modified"].timestamp() for found in listed}
        valid, over = leases_at(max(times.values(), default=0.0) - _RESOLUTION, times)
        self.delete([f"{_LEASES}/{name}" for name in over])
        return valid

    def release(self, name: str) -> None:
        self.delete([f"{_LEASES}/{name}"])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- reading ----

    def _value(self, name: str) -> tuple[bytes | None, ObjectMeta | None]:
        with suppress(FileNotFoundError), self._explained():
            found = obstore.get(self._store, name)
            if found.meta["size"] > most_bytes(name):
                return b"", found.meta
            # what a head states and what follows it are two things
            return b"".join(self._bounded(found.stream(min_chunk_size=1), found.meta["size"])), found.meta
        return None, None

    def _bounded(self, pieces: Iterable[Any], most: int) -> Iterator[bytes]:
        begun, came = time.monotonic(), 0
        for piece in pieces:
            data = bytes(piece)
            came += len(data)
            if came > most:
                raise RemoteError(f"{self.url} sends more than was asked for", "check the address of the service")
            yield data
            seconds = time.monotonic() - begun
            if seconds > self._timeout and came < seconds * LEAST_RATE:
                raise RemoteError(f"{self.url} did not answer within {self._timeout:g} s", "check the line")

    def fetch(self, requests: Sequence[BlobRequest]) -> Iterator[tuple[int, bytes | None]]:
        return ((number, piece) for number, request in enumerate(requests) for piece in self._pieces(request))

    def _pieces(self, request: BlobRequest) -> Iterator[bytes | None]:
        part: Any = {"range": (request.start, request.start + request.most)} if request.pack else None
        try:
            with self._explained():
                try:
                    found = obstore.get(self._store, request.pack or request.name, options=part)
                except BaseError as error:
                    if part and status_of(str(error)) == 416:  # it ends before: it was cut off
                        return
                    raise
                if not part and found.meta["size"] > min(request.most, most_bytes(request.name)):
                    return
                yield from self._bounded(found.stream(min_chunk_size=_PIECE), request.most)
        except FileNotFoundError:
            yield None

    # ---- writing ----

    @cached_property
    def _sending(self) -> ObjectStore:
        """Open the same place with a longer timeout: an answer comes after all of a value was sent."""
        return open_objects(self._address, self._timeout, writing=True)

    # ---- both ----

    def _each(self, job: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
        return list(self._pool.map(job, names))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if _NO_PLACE.search(str(error)):
                raise _no_place(self.url) from None
            raise
        except Exception as error:
            if not (isinstance(error, OSError | ValueError) or type(error).__module__.startswith("obstore")):
                raise
            raise _in_words(self.url, self._timeout, type(error).__name__, str(error)) from None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._address.read_only:
            raise RemoteError(f"{self.url} can only be read", "push to where it may be written")
        with self._explained():
            yield


# ---- the place of a URL, with the credentials of the environment, a profile or the machine's role ----------------

_RETRIES = 3
_WHOLE = 3600.0  # seconds for a whole value, however slowly it comes; a caller gives up sooner
_WRITE = 120.0  # seconds without an answer to values that are sent: four packs at 2 Mbit/s

# Where a service is named by the environment instead of the URL; one that is spelled http:// is meant so.
_ENDPOINTS: Mapping[str, Sequence[str]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_OWN_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_PROFILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_SUCH_AS = "such as s3://bucket/folder, gs://bucket/folder, az://container/folder or https://host/folder"


class Address(NamedTuple):
    kind: str
    place: str
    folder: str

    @property
    def read_only(self) -> bool:
        return self.kind in ("https", "http")


def address_of(url: str) -> Address:
    parts = urlsplit(url)
    shown = for_people(url)
    if "@" in url:
        hint = "credentials come from the environment, a profile or the machine's role; a folder's name has no @"
        raise UsageError(f"{shown} holds a user or a password", hint)
    if "?" in url or "#" in url:
        raise UsageError(f"{shown} has text after ? or #", _SUCH_AS)
    folder = parts.path.strip("/")
    if not is_host(parts.netloc) or any(part in ("", ".", "..") for part in folder.split("/") if folder):
        raise UsageError(f"{shown} names no bucket or folder", _SUCH_AS)
    return Address(parts.scheme.lower(), parts.netloc, folder)


def open_objects(address: Address, timeout: float, writing: bool = False) -> ObjectStore:
    """Open an address with obstore; no request is sent yet. `writing` allows time to send values over a slow line."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS.get(address.kind, ()) if os.environ.get(name)), "")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=timeout),
        "read_timeout": timedelta(seconds=max(timeout, _WRITE) if writing else timeout),
        "timeout": timedelta(seconds=_WHOLE),
    }
    if address.kind == "http" or endpoint.startswith("http://"):
        client["allow_http"] = True
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1.0), "base": 2}
    retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout), "backoff": backoff}
    options: dict[str, Any] = {"client_options": client, "retry_config": retries}
    if address.read_only:
        return HTTPStore(f"{address.kind}://{address.place}/{address.folder}", **options)
    options["prefix"] = address.folder or None
    if address.kind == "s3":
        return S3Store(address.place, credential_provider=_profile(), **options)
    if address.kind == "gs":
        return GCSStore(address.place, **options)
    return AzureStore(address.place, **options)


def _profile() -> Any:
    """Return credentials of a profile of the AWS tools if the environment holds none. None: obstore finds them in the
    environment or by the machine's role."""
    named = bool(os.environ.get("AWS_PROFILE"))
    there = [Path(os.environ.get(name) or default).expanduser() for name, default in _PROFILES.items()]
    if any(os.environ.get(name) for name in _OWN_KEYS) or not (named or any(path.exists() for path in there)):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise KvtoolError("a profile of AWS needs the package boto3", extra_line("objects")) from error
    try:
        return Boto3CredentialProvider()
    except ValueError:  # it holds no credentials
        return None
    except BotoCoreError as error:
        raise KvtoolError(f"the AWS profile cannot be used: {error}", "check AWS_PROFILE and ~/.aws") from error


# ---- errors in plain words: the service's own hold addresses and keys, and are not passed on ----------------------

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
_NO_PLACE = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist|container does not exist")
_ROLE = re.compile("/latest/(?:api/token|meta-data)|computeMetadata|/identity/oauth2|MissingAccount")  # of a role
_FULL = re.compile("Quota|StorageFull|InsufficientStorage")
_CHECK = "check the address, the endpoint and that the service runs"
_RIGHTS = "check credentials, region and rights: kvtool lists, reads, writes and deletes below the folder"
_WITHOUT_STATUS = (  # what the text of an error holds, what it says of the service, a hint
    ("Received redirect", "is elsewhere", "set AWS_REGION to the bucket's region; check the endpoint"),
    (
        "InvalidCertificate",
        "shows a certificate of an authority that is not known here",
        "name its file in SSL_CERT_FILE; AWS_CA_BUNDLE and REQUESTS_CA_BUNDLE are not looked at",
    ),
    ("Timeout|TimedOut", "did not answer within {seconds:g} s", _CHECK),
    (
        "Range request not supported|non-partial response",
        "gives whole values only",
        "let its server answer range requests",
    ),
    ("Header missing", "answers as no such service does", _CHECK),
    ("Connect", "cannot be reached", _CHECK),
)


def status_of(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _in_words(url: str, timeout: float, kind: str, text: str) -> KvtoolError:
    status, code = status_of(text), _CODE.search(text)
    said = f"{status} {code[1]}" if code else str(status)
    if _NO_PLACE.search(text):
        return _no_place(url)
    if _ROLE.search(text):
        return RemoteError(f"no credentials for {url} were found", _RIGHTS)
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return RemoteError(f"{url} refuses: {said}", _RIGHTS)
    if status == 507 or _FULL.search(text):
        return NoSpaceError(f"{url} is full", "free some space there, or push elsewhere")
    if status in (429, 503):
        return RemoteError(f"{url} is busy: {said}", "try again later; a push continues where it stopped")
    if status:
        return RemoteError(f"{url} failed: {said}", _CHECK)
    for mark, words, hint in _WITHOUT_STATUS:
        if re.search(mark, text):
            return RemoteError(f"{url} {words.format(seconds=timeout)}", hint)
    return RemoteError(f"{url} broke off", _CHECK)


def _no_place(url: str) -> RemoteError:
    return RemoteError(f"there is no bucket or container for {url}", "make it first; check its name and endpoint")
