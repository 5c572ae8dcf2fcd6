"""Opens the bucket, the container or the web folder of a URL, by obstore, with the credentials that are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvtool.core.common.installing import extra_line
from kvtool.core.common.urls import for_people, is_host
from kvtool.core.errors import KvtoolError, UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_RETRIES = 3
_WHOLE = 3600.0  # seconds for a whole value, however slowly it comes; whoever waits for one gives up sooner
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
    """An address taken from a URL: its kind, the bucket, container or host, and the folder in it."""

    kind: str
    place: str
    folder: str

    @property
    def read_only(self) -> bool:
        """Return True for a web server, which can only be read."""
        return self.kind in ("https", "http")


def address_of(url: str) -> Address:
    """Raises UsageError for a URL that names no place, or holds what does not belong into it."""
    parts = urlsplit(url)
    shown = for_people(url)
    if "@" in url:
        hint = "credentials come from the environment, a profile or the machine's role; no @ stands in a folder's name"
        raise UsageError(f"{shown} holds a user or a password", hint)
    if "?" in url or "#" in url:
        raise UsageError(f"{shown} has something behind ? or #", _SUCH_AS)
    folder = parts.path.strip("/")
    if not is_host(parts.netloc) or any(part in ("", ".", "..") for part in folder.split("/") if folder):
        raise UsageError(f"{shown} names no place of values", _SUCH_AS)
    return Address(parts.scheme.lower(), parts.netloc, folder)


def open_objects(address: Address, timeout: float, writing: bool = False) -> ObjectStore:
    """Open an address with obstore; no request is sent yet.

    Parameters
    ----------
    timeout : seconds to wait for a connection, an answer or the next bytes.
    writing : allow enough time to send values over a slow line.

    Raises
    ------
    KvtoolError : obstore is not installed, or boto3, which a profile needs.
    """
    try:
        from obstore import store
    except ImportError as error:
        raise KvtoolError(f"{address.kind}:// needs the package obstore", extra_line("objects")) from error
    options: dict[str, Any] = {"client_options": _client(address, timeout, writing), "retry_config": _retries(timeout)}
    if address.read_only:
        return store.HTTPStore(f"{address.kind}://{address.place}/{address.folder}", **options)
    options["prefix"] = address.folder or None
    if address.kind == "s3":
        return store.S3Store(address.place, credential_provider=_profile(), **options)
    if address.kind == "gs":
        return store.GCSStore(address.place, **options)
    return store.AzureStore(address.place, **options)


def _client(address: Address, timeout: float, writing: bool) -> dict[str, Any]:
    endpoint = next((os.environ[name] for name in _ENDPOINTS.get(address.kind, ()) if os.environ.get(name)), "")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=timeout),
        "read_timeout": timedelta(seconds=max(timeout, _WRITE) if writing else timeout),
        "timeout": timedelta(seconds=_WHOLE),
    }
    if address.kind == "http" or endpoint.startswith("http://"):
        client["allow_http"] = True
    return client


def _retries(timeout: float) -> dict[str, Any]:
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1.0), "base": 2}
    return {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout), "backoff": backoff}


def _profile() -> Any:
    """Credentials of a profile of the AWS tools, where there is one and the environment holds none of its own; None: as
    obstore finds them, in the environment or by the machine's role."""
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
