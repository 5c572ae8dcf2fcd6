"""Fixtures of the tests of commands: a tiny model, a small corpus, a store made of it, and kvtool run on them.

Most runs are in this process (`kvtool`): a process of its own imports torch, which takes seconds (`process`).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import torch

from kvtool.cli.app import main
from kvtool.core.cache.integrity import find_damage
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW
from kvtool.core.corpus.options import Shard
from kvtool.core.records.encode import sealed

LAYERS = 4  # of the tiny model
QUESTION = "Who built the third mill?"
CHUNKS = ("--chunk-tokens", "64")
# Short: the passages of the `warm` lead-in are a thousand tokens in the tiny vocabulary.
PREFIX = ("--lead-in", "prefix")
SHORT = ("--max-tokens", "4")
_END = 1  # the token
SEEN = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, self.out + self.err
        value: dict[str, Any] = json.loads(self.out)
        assert value["schema"] == 1
        return value

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def failed(self, code: int, *said: str) -> Done:
        """Check an error: its code, one `error:` and one `hint:` on stderr, nothing on stdout but an error object."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.err.count("error: ") == 1, self.err
        assert "\nhint: " in "\n" + self.err
        assert "Traceback" not in self.err
        assert "bug in kvtool" not in self.err
        for text in said:
            assert text in self.err
        if self.out:
            error = json.loads(self.out)["error"]
            assert error["exit_code"] == code
            assert f"error: {error['message']}\n" in self.err
        return self

    def fine(self, code: int = 0) -> Done:
        assert self.code == code, (self.code, self.out, self.err)
        assert "error: " not in self.err
        return self


def kvtool(*args: object, stdin: bytes = b"") -> Done:
    return script(main, *args, stdin=stdin)


def script(run: Callable[[list[str]], int], *args: object, stdin: bytes = b"") -> Done:
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(arg) for arg in args])
    except SystemExit as ended:  # argparse's
        code = int(ended.code or 0)
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Callable[[], str]]:
    """Make stdout a terminal of so many columns; yield a function that returns what was written, without colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # its end
            while data := os.read(master, 4096):
                written.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
            yield lambda: re.sub(r"\x1b\[[0-9;]*m", "", written.decode().replace("\r\n", "\n"))
    finally:
        reader.join()
        os.close(master)


def on_terminal(*args: object, columns: int = 100) -> Done:
    err = io.StringIO()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO())
    try:
        with terminal(columns) as written, contextlib.redirect_stderr(err):
            code = main([str(arg) for arg in args])
    finally:
        sys.stdin = before
    return Done(code, written(), err.getvalue())


def in_terminal(*args: object, typed: bytes = b"", stdout: int | None = None) -> Done:
    """Run a process whose streams are a terminal, shown as `err`; stdout may be a pipe."""
    master, slave = pty.openpty()
    env = environment(TERM="xterm")
    with subprocess.Popen(command(*args), stdin=slave, stdout=stdout or slave, stderr=slave, env=env) as child:
        os.close(slave)
        os.write(master, typed)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: it has ended
            while more := os.read(master, 1 << 16):
                shown += more
        out = child.stdout.read() if child.stdout else b""
    os.close(master)
    return Done(child.returncode, out.decode(), shown.decode())


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "kvtool", *map(str, args)]


def process(*args: object, stdin: bytes = b"", **variables: str) -> Done:
    found = subprocess.run(
        command(*args), input=stdin, capture_output=True, env=environment(**variables), timeout=120, check=False
    )
    return Done(found.returncode, found.stdout.decode(), found.stderr.decode())


def environment(**variables: str) -> dict[str, str]:
    """One thread: the tiny model has no work for two, and two that wait for each other are slow on a busy machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def payloads(path: Path) -> dict[tuple[str, int], bytes]:
    """Every KV payload of a store by chunk and layer, as bytes, each checked against its digest."""
    with Store.open(path) as store:
        found = {}
        for chunk in store.chunk_ids():
            for layer in range(LAYERS) if store.levels(chunk) else ():
                record = store.read_kv(chunk, "raw", layer)
                found[chunk.hex(), layer] = bytes(record[1])
        return found


def listing(path: Path) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = kvtool("store", "ls", "--store", path, "--json").fine().json["documents"]
    return documents


def chunks_of(path: Path, name: str) -> list[str]:
    (document,) = [document for document in listing(path) if document["source"].endswith(name)]
    return [chunk["id"] for chunk in document["chunks"]]


def damages(path: Path) -> list[str]:
    with Store.open(path) as store:
        return [damage.reason for damage in find_damage(store, Fraction(1))]


def emptied(path: Path) -> Done:
    at = ("store", "prune", "--json", "--store", path)
    said = kvtool(*at, "--max-size", "1", "--dry-run").json
    return kvtool(*at, "--max-size", said["bytes_after"] + 16_384, "--yes").fine()


def state(path: Path) -> tuple[object, ...]:
    """What a store holds, when it was used aside; compare before and after."""
    documents = listing(path)
    for document in documents:
        document.pop("last_used", None)
    for chunk in (chunk for document in documents for chunk in document["chunks"]):
        del chunk["last_used"]
    return documents, payloads(path), kvtool("inspect", "--store", path, "--json").json["model"]


@contextlib.contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Whatever happens inside, the store verifies afterwards and holds what it held; the same bytes do."""
    before = files_below(path)
    yield
    if files_below(path) == before:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, data in before.items():
            there = Path(folder, Path(name).relative_to(path))
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(data)
        assert damages(path) == []
        assert state(path) == state(Path(folder))


def files_below(path: Path) -> dict[str, bytes]:
    aside = ("lock.mdb", "writer.lock", "access.log", "served.log")
    return {str(f): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file() and f.name not in aside}


def break_record(path: Path, chunk: str, layer: int) -> None:
    """Flip one bit of a record, right in the data file."""
    data = path / "data" / "gen-1" / "data.mdb"
    content, payload = data.read_bytes(), payloads(path)[chunk, layer]
    assert content.count(payload) == 1
    at = content.index(payload) + len(payload) // 2
    with data.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 4]))


def drop_records(path: Path, *chunks: str) -> None:
    """Make holes: the chunks are still described, their KV is gone."""
    with Store.open(path) as store, store.writer() as writer:
        assert writer.drop_level([bytes.fromhex(chunk) for chunk in chunks], "raw") == len(chunks)


def flip_row(path: Path, table: bytes, key: bytes) -> None:
    """Flip a bit in the middle of a small row."""
    with Store.open(path) as store:
        with store.snapshot() as snapshot:
            data = bytearray(snapshot.get(table, key) or b"")
        data[len(data) // 2] ^= 1
        store.environment.write(lambda transaction: transaction.put(table + key, bytes(data)), 0)


def misshape(path: Path, *chunks: bytes) -> None:
    """Replace the exact records of chunks by sound ones of another shape, as of another model."""
    with Store.open(path) as store, store.writer() as writer:
        for chunk in chunks:
            info = store.chunk_info(chunk)
            wrong = torch.zeros(1, len(info.token_ids), 8, dtype=torch.float32)
            payload = [bytes(2 * wrong.nbytes)]
            layers = [sealed(chunk, (wrong, wrong), RAW, layer, payload) for layer in range(info.layers)]
            writer.put_chunk(chunk, info, RAW, layers, replace=True)


def fail_gate(path: Path) -> None:
    with Store.open(path) as store:
        (verdict,) = (path / "gate").glob("*.json")
        row = store.read_side(f"gate/{verdict.name}")
        assert row["passed"] is True
        row["checks"][3] |= {"difference": 0.7312, "passed": False}
        assert store.write_side(f"gate/{verdict.name}", row | {"passed": False})


def prefix_chunk(path: Path) -> str:
    known = {chunk["id"] for document in listing(path) for chunk in document["chunks"]}
    with Store.open(path) as store:
        (found,) = {chunk.hex() for chunk in store.chunk_ids()} - known
    return found


def write_corpus(folder: Path, documents: int = 6, paragraphs: int = 5, parts: int = 1) -> Path:
    """Small documents of a few chunks each; document n is about the n-th mill.

    Which of several `parts` a document is in follows from the folder's path: there are more of them until each has one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    without = {Shard(index, parts) for index in range(parts)}
    for number in count():
        if number >= documents and not without:
            return folder
        without -= {part for part in without if part.holds(str(folder / f"mill{number}.md"))}
        which = SEEN[number] if number < len(SEEN) else f"number {number}"
        text = f"# The {which} mill\n\n" + "\n\n".join(paragraph(which, number, n) for n in range(paragraphs))
        (folder / f"mill{number}.md").write_text(text, encoding="utf-8")
    raise AssertionError("some part holds no file")


def write_batch(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def paragraph(which: str, number: int, n: int) -> str:
    return f"The {which} mill was built in {1700 + 31 * number + 7 * n} by baker {'ABCDEFGHIJ'[n]}. It grinds flour."
