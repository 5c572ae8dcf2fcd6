"""Certificate of an https server: checked before a model is loaded, reloaded when its files change."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvtool.core.common.types import Warn
from kvtool.core.errors import UsageError

_BEFORE, _AFTER = 9, 10  # OpenSSL's codes of a certificate that is not valid yet, or not any more
_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate chain and its private key, in PEM files. Raises UsageError.

    Each connection of `context` checks whether the files have changed, and gets the new certificate; if the new files
    cannot be used, the old one stays, with one warning.
    """

    def __init__(self, chain: Path, key: Path, warn: Warn) -> None:
        self._chain, self._key, self._warn = chain, key, warn
        self._stamp = self._stamped()
        self._current = self.context = _loaded(chain, key)
        self.context.sni_callback = self._met

    def _met(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = _loaded(self._chain, self._key)
            except UsageError as error:
                self._warn(f"the certificate was not renewed: {error.message}", error.hint)
        connection.context = self._current

    def _stamped(self) -> _Stamp:
        found = []
        for path in (self._chain, self._key):
            with suppress(OSError):
                found.append(path.stat())
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _loaded(chain: Path, key: Path) -> ssl.SSLContext:
    _check_holds(chain, b"-----BEGIN CERTIFICATE-----", "certificate")
    _check_holds(key, b"PRIVATE KEY-----", "private key")

    def encrypted() -> NoReturn:
        raise UsageError(f"the key in {key} is encrypted", f"`openssl pkey -in {key} -out FILE` decrypts it")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(chain, key, password=encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            hint = "name the key that the certificate was made for, or both anew"
            raise UsageError(f"the key in {key} is not that of the certificate in {chain}", hint) from error
        why = error.reason or str(error)
        raise UsageError(f"the certificate in {chain} or its key cannot be used: {why}", "PEM files") from error
    _check_valid(chain, context)
    return context


def _check_holds(path: Path, mark: bytes, what: str) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"the {what} in {path} cannot be read: {why}", "check the path and its permissions") from error
    if mark not in data:
        raise UsageError(f"{path} holds no {what} in PEM", f"a PEM file has a line {mark.decode().lstrip()!r}")


def _check_valid(chain: Path, server: ssl.SSLContext) -> None:
    """Refuse a certificate that every client would refuse, by a handshake with a client that trusts only it."""
    client = ssl.create_default_context(cafile=str(chain))
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_BEFORE, _AFTER):
                what = "has expired" if error.verify_code == _AFTER else "is not valid yet"
                raise UsageError(f"the certificate in {chain} {what}", "renew it, or set the clock") from error
            return  # a client that trusts it in another way may accept it
