"""https with certificates made here: asked by curl and the `openai` client, and refused."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx2
import openai
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from kvtool.serve.engine import Engine
from tests.cli.working import QUESTION, kvtool
from tests.serve.conftest import KEY, PATIENCE, serving, wait_until
from tests.serve.test_process import running


class Place:
    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.trusted, self.chain, self.key = (folder / name for name in ("ca.pem", "chain.pem", "key.pem"))
        self.authority.cert_pem.write_to_path(self.trusted)
        self.renew()

    def renew(self) -> None:
        made = self.authority.issue_cert("localhost", "127.0.0.1")
        self.chain.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(self.key)

    @property
    def flags(self) -> tuple[object, ...]:
        return ("--tls-cert", self.chain, "--tls-key", self.key)

    @property
    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.trusted)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_and_the_openai_client_over_https(ready: Path, place: Place, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with running("--store", ready, "--key-file", key, "--max-tokens", "4", *place.flags) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        url = url.replace("127.0.0.1", "localhost")
        asked = ("curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", str(PATIENCE))
        done = subprocess.run([*asked, "--cacert", place.trusted, f"{url}/health"], capture_output=True, check=True)
        assert b'"status":"ok"' in done.stdout
        stranger = subprocess.run([*asked, f"{url}/health"], capture_output=True, check=False)
        assert stranger.returncode == 60  # who does not trust the authority
        http = httpx2.Client(verify=place.client, timeout=PATIENCE)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http, max_retries=0) as client:
            messages = [{"role": "user", "content": QUESTION}]
            whole = client.chat.completions.create(model="kvtool", messages=messages)  # type: ignore[arg-type]
            stream = client.chat.completions.create(model="kvtool", messages=messages, stream=True)  # type: ignore
            pieces = [event.choices[0].delta.content or "" for event in stream if event.choices]
        assert "".join(pieces) == whole.choices[0].message.content


def test_who_speaks_no_tls_keeps_nobody_from_it(ready: Path, place: Place) -> None:
    """Nor does a handshake that never ends."""
    with serving(ready, tls_cert=place.chain, tls_key=place.key) as served, ExitStack() as held:
        for rubbish in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff", b""):
            with served.connect() as made:
                made.sendall(rubbish)
                made.shutdown(socket.SHUT_WR)
                while made.recv(4096):
                    pass
        for number in range(40):
            half = held.enter_context(served.connect())
            half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[: number % 12])
        with httpx2.Client(verify=place.client, timeout=PATIENCE) as http:
            assert http.get(f"{served.url}/health").status_code == 200
        wait_until(lambda: len(served.log) == 1)
        assert served.warnings == []


def test_certificates_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    ready: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = ("serve", "--store", ready, "--port", "0")
    monkeypatch.setattr(Engine, "start", lambda self: pytest.fail("a model was to be loaded"))

    def refused(*said: str) -> None:
        kvtool(*serve, *place.flags).failed(2, *said)

    place.authority.issue_cert("localhost").private_key_pem.write_to_path(place.key)
    refused("key values mismatch")
    place.renew()
    key = serialization.load_pem_private_key(place.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    for form in (serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL):
        place.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
        refused("is encrypted", "openssl pkey")
    place.key.write_bytes(place.chain.read_bytes())
    refused("cannot be used")
    place.renew()
    place.chain.write_bytes(ssl.PEM_cert_to_DER_cert(place.chain.read_text()))
    refused("cannot be used")
    place.chain.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    refused("cannot be used")
    place.chain.unlink()
    refused("cannot be used: no such file", str(place.chain))
    kvtool(*serve, *place.flags[:2]).failed(2, "belong together")
