"""A `kvtool serve` in a process of its own, and clients that read its answers piece by piece."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class Told:
    """One streamed answer, as its client has seen it; times in seconds, of the whole from the request on."""

    question: str
    text: str
    first: float
    whole: float
    tokens: int
    prompt: int


@contextmanager
def serving(store: Path, max_tokens: int, parallel: int, home: Path) -> Iterator[tuple[str, int, str]]:
    """A server in a process of its own: host, port, key."""
    environment = {**os.environ, "KVTOOL_HOME": str(home)}
    command = [sys.executable, "-m", "kvtool", "serve", "--store", str(store), "--port", "0"]
    command += ["--max-tokens", str(max_tokens), "--parallel", str(parallel), "--queue", "1000"]
    command += ["--request-timeout", f"{PATIENCE}", "--request-log", str(home / "log.jsonl"), "--no-socket"]
    home.mkdir(exist_ok=True)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"listening at http://([\d.]+):(\d+)", said)):
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"the server has not begun: {said}")
                said += line
            yield found[1], int(found[2]), (home / "data/serve.key").read_text().strip()
        finally:
            process.terminate()


def ask(place: tuple[str, int, str], question: str, pieces: list[float] | None = None, **wanted: Any) -> Told:
    """One streamed answer.

    Parameters
    ----------
    pieces : takes when each piece came, by `time.perf_counter`.
    wanted : more of the request.
    """
    host, port, key = place
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    body = json.dumps({"messages": [{"role": "user", "content": question}], "stream": True, **wanted})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began, first, text, facts = time.perf_counter(), None, "", {}
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:200]!r}")
        for event in events(response):
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            piece = event["choices"][0]["delta"].get("content", "")
            if piece and first is None:
                first = time.perf_counter() - began
            if piece and pieces is not None:
                pieces.append(time.perf_counter())
            text, facts = text + piece, event.get("kvtool", facts)
    whole, counts = time.perf_counter() - began, facts["tokens"]
    return Told(question, text, whole if first is None else first, whole, counts["generated"], counts["prompt"])


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)
    raise RuntimeError("the stream has no end")
