"""`rediss://` and `https://` before a peer that shows a certificate of another, an old one, its own, or none."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme

from kvtool.core.errors import KvtoolError
from kvtool.core.remote.blobs import open_blobs
from tests.remote.object_stub import TcpServer

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
PATIENCE = 0.5


class Peer(TcpServer):
    """Shakes hands as its context does, or not at all, and keeps what clients say to it afterwards."""

    def __init__(self, context: ssl.SSLContext | None, plain: bytes = b"") -> None:
        self.said = bytearray()
        self._context, self._plain = context, plain
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        if self._context is not None:
            client = self._context.wrap_socket(client, server_side=True)
            self.said += client.recv(65536)
            client.close()
        elif self._plain:
            client.recv(65536)
            client.sendall(self._plain)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(
    params=["wrong name", "expired", "not yet", "self-signed", "old protocol", "plain text", "silence", "good"]
)
def peer(request: pytest.FixtureRequest, authority: trustme.CA) -> Iterator[tuple[str, Peer]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = {
        "wrong name": lambda: authority.issue_cert("elsewhere.example"),
        "expired": lambda: authority.issue_cert("127.0.0.1", not_before=NOW - 2 * DAY, not_after=NOW - DAY),
        "not yet": lambda: authority.issue_cert("127.0.0.1", not_before=NOW + DAY, not_after=NOW + 2 * DAY),
        "self-signed": lambda: trustme.CA().issue_cert("127.0.0.1"),
    }
    made.get(request.param, lambda: authority.issue_cert("127.0.0.1"))().configure_cert(context)
    if request.param == "old protocol":
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    plain = b"-ERR no TLS here\r\nHTTP/1.1 200 OK\r\n\r\n" if request.param == "plain text" else b""
    with closing(Peer(None if request.param in ("plain text", "silence") else context, plain)) as opened:
        yield request.param, opened


def met(url: str, kind: str, peer: Peer) -> None:
    with closing(open_blobs(url, PATIENCE)) as blobs:
        with pytest.raises(KvtoolError) as caught:
            blobs.get(["head"])
        assert caught.value.exit_code == 1
        assert caught.value.hint
    assert bool(peer.said) == (kind == "good")


def test_redis(peer: tuple[str, Peer], authority: trustme.CA, tmp_path: Path) -> None:
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trusted)
    met(f"rediss://:secret@127.0.0.1:{peer[1].port}/0?ssl_ca_certs={trusted}", *peer)


def test_https(peer: tuple[str, Peer], authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    met(f"https://127.0.0.1:{peer[1].port}/kv", *peer)
