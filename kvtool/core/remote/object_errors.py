"""Errors of an object store, in plain words. Its own messages hold addresses and keys, and are not passed on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvtool.core.errors import KvtoolError, NoSpaceError, RemoteError

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


@contextmanager
def explained(url: str, timeout: float) -> Iterator[None]:
    """Errors of obstore as a KvtoolError; FileNotFoundError of a value that is missing goes through."""
    try:
        yield
    except FileNotFoundError as error:
        if _NO_PLACE.search(str(error)):
            raise _no_place(url) from None
        raise
    except Exception as error:
        if not (isinstance(error, OSError | ValueError) or type(error).__module__.startswith("obstore")):
            raise
        raise _in_words(url, timeout, type(error).__name__, str(error)) from None


def status_of(error: BaseException) -> int:
    """The HTTP status that an error of obstore tells; 0: none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _in_words(url: str, timeout: float, kind: str, text: str) -> KvtoolError:
    found, code = _STATUS.search(text), _CODE.search(text)
    status = int(found[1]) if found else 0
    said = " ".join([str(status), *([code[1]] if code else [])])
    if _NO_PLACE.search(text):
        return _no_place(url)
    if _ROLE.search(text):
        return RemoteError(f"no credentials for {url} were found", _RIGHTS)
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return RemoteError(f"{url} refuses: {said}", _RIGHTS)
    if status == 507 or _FULL.search(text):
        return NoSpaceError(f"{url} is full", "free some space there, or push elsewhere")
    if status in (429, 503):
        return RemoteError(f"{url} is busy: {said}", "try again later; a push goes on where it was")
    if status:
        return RemoteError(f"{url} failed: {said}", _CHECK)
    for mark, words, hint in _WITHOUT_STATUS:
        if re.search(mark, text):
            return RemoteError(f"{url} {words.format(seconds=timeout)}", hint)
    return RemoteError(f"{url} broke off", _CHECK)


def _no_place(url: str) -> RemoteError:
    return RemoteError(f"there is no bucket or container for {url}", "make it first; check its name and endpoint")
