"""JSON has one vocabulary: `kvtool help json` lists every command's object field by field, and every name once."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, chunks_of, drop_records, kvtool, write_corpus

Objects = list[dict[str, Any]]


def every_command(folder: Path, store: Path, fitted: Path, tiny: Path) -> dict[str, Objects]:
    """The objects on stdout by the command's name.

    Parameters
    ----------
    folder : an empty one to work in.
    store : a raw store of `write_corpus` (six documents), to be used up.
    fitted : a store with a profile and all levels, to be used up.
    """
    corpus = write_corpus(folder / "corpus", 2)
    others = write_corpus(folder / "others", 1)
    for each in (corpus, others):
        (each / "odd.txt").write_bytes(b"\0\1\2\3")
    batch = folder / "batch.jsonl"
    questions = ({"id": "a", "question": QUESTION, "answers": ["baker A"]}, {"question": "zzyzx"})
    batch.write_text("".join(json.dumps(row) + "\n" for row in questions))
    good = folder / "good.jsonl"
    good.write_text(json.dumps(questions[0] | {"sources": ["mill1.md"]}) + "\n")
    chunk, damaged, *_ = chunks_of(store, "mill2.md")
    tier, pack = f"file://{folder / 'tier'}", folder / "all.kvpack"
    drop_records(store, damaged)  # a hole, so that there is a miss
    here, there, schemes = ("--store", store), ("--store", fitted), ("--scheme", "1")
    fresh = ("--store", folder / "fresh")
    return {
        name: list(_objects(*args))
        for name, args in {
            "ingest": ("ingest", corpus, *fresh, "--model", tiny, *CHUNKS, *PREFIX, "--json"),
            "serve": ("serve", "--show-key", "--json"),
            "ingest (events)": ("ingest", others, *fresh, "--jsonl"),
            "ingest (dry run)": ("ingest", corpus, *fresh, "--dry-run", "--json"),
            "compress": ("compress", *fresh, "--fit", "--level", "1", "--level", "lossless", "--json"),
            "compress (events)": ("compress", *fresh, "--level", "3", "--jsonl"),
            "query": ("query", QUESTION, *here, *SHORT, "--token-ids", "--explain", "--json"),
            "search": ("search", *QUESTION.split(), *here, "--json"),
            "query (auto)": ("query", QUESTION, *here, *SHORT, "--fusion", "auto", "--json"),
            "query (deferred)": ("query", QUESTION, *here, *SHORT, "--defer", "--set", "defer.threshold=1", "--json"),
            "query (events)": ("query", QUESTION, *here, *SHORT, "--jsonl"),
            "query --compare": ("query", QUESTION, *here, *SHORT, "--compare", "reuse", "--json"),
            "query (batch)": ("query", "--batch", batch, *here, *SHORT, "--audit", "1"),
            "inspect audit": ("inspect", "audit", *here, "--json"),
            "query --compare (batch)": ("query", "--batch", good, *here, *SHORT, "--compare", "reuse"),
            "error (a question)": ("query", "zzyzx", *here, "--json"),
            "error (events)": ("query", "zzyzx", *here, "--jsonl"),
            "query (kept)": ("query", QUESTION, *here, *SHORT, "--keep-alive", "2m", "--json"),
            "ps": ("ps", "--json"),
            "stop": ("stop", *here, "--json"),
            "inspect": ("inspect", *there, "--json"),
            "inspect gate": ("inspect", "gate", *here, "--json"),
            "inspect codec": ("inspect", "codec", *there, "--batch", good, *schemes, "--json"),
            "eval": ("eval", good, *here, "--runs", "reuse,epic:4", "--json"),
            "eval --make": ("eval", folder / "made.jsonl", "--make", "1", *here, "--json"),
            "inspect deviation": ("inspect", "deviation", QUESTION, *here, "--json"),
            "inspect sparsity": ("inspect", "sparsity", QUESTION, *here, "--json"),
            "inspect plan": ("inspect", "plan", QUESTION, *here, "--json"),
            "inspect chunk": ("inspect", "chunk", chunk, *here, "--json"),
            "store stats": ("store", "stats", *there, "--json"),
            "store ls": ("store", "ls", *there, "--json"),
            "store pin": ("store", "pin", "mill2.md", *here, "--json"),
            "store pin (undone)": ("store", "pin", "--remove", "mill2.md", *here, "--json"),
            "store push": ("store", "push", tier, *here, "--json"),
            "query (shared)": ("query", QUESTION, "--store", tier, *SHORT, "--slo-ms", "5000", "--json"),
            "store push (pull)": ("store", "pull", tier, "--store", folder / "pulled", "--json"),
            "store export": ("store", "export", pack, *here, "--json"),
            "store import": ("store", "import", pack, "--store", folder / "taken", "--json"),
            "store import (several)": ("store", "import", pack, store, "--store", folder / "merged", "--json"),
            "store rm": ("store", "rm", "*mill5.md", *here, "--json"),
            "store prune": ("store", "prune", "--max-size", "1", *there, "--dry-run", "--json"),
            "store compact": ("store", "compact", *here, "--json"),
            "store verify": ("store", "verify", *here, "--sample", "1/1", "--json"),
            "config": ("config", "show", "--json"),
            "doctor": ("doctor", *here, "--json"),
        }.items()
    }


def _objects(*args: object) -> Iterator[dict[str, Any]]:
    done = kvtool(*args)
    for line in done.out.splitlines():
        yield json.loads(line)
    if not done.out:
        raise AssertionError((args, done.code, done.err))


PAGE = (files("kvtool") / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
# A shape is a dictionary by name, with "?" after an optional name; a list of one; None for a value; a text for
# another object of the page. The key OPEN stands for any.
OPEN = "ANY"
PARTS = frozenset(  # objects that only others contain
    "engine gate passage chunk scores distances averages contents size evaluation mass cache transfer".split()
)
Shape = Any


def shapes() -> dict[str, Shape]:
    lines = (re.fullmatch(r"    ([a-z][^:]*): (\{.*\})", line) for line in PAGE.splitlines())
    parsed = {found[1]: parse(found[2]) for found in lines if found}
    return {name: spread(shape, parsed) for name, shape in parsed.items() if name not in PARTS}


def spread(shape: Shape, parsed: dict[str, Shape]) -> Shape:
    """Replace `...name` and `[name]` by the fields of that object."""
    if isinstance(shape, list):
        return [spread(shape[0], parsed)]
    if isinstance(shape, str):
        return spread(parsed[shape], parsed)
    if shape is None:
        return None
    fields: dict[str, Shape] = {}
    for name, inner in shape.items():
        if name.startswith("..."):
            optional = "?" * name.endswith("?")
            others = spread(parsed[name.strip(".?")], parsed)
            fields |= {other.rstrip("?") + "?" if optional else other: value for other, value in others.items()}
        else:
            fields[name] = spread(inner, parsed)
    return fields


def parse(text: str) -> Shape:
    """The shape that a text like `{a, b?{c}, d[{e}], f{NAME}}` means."""
    shape, rest = _parse(text)
    assert not rest, rest
    return shape


def _parse(text: str) -> tuple[Shape, str]:
    if text.startswith("["):
        inner, text = _parse(text[1:])
        assert text[0] == "]", text
        return [inner], text[1:]
    if not text.startswith("{"):
        other = re.match(r"[a-z]+(?=\])", text)  # another object of the page, by its name
        return (other[0], text[other.end() :]) if other else (None, text)
    shape: dict[str, Shape] = {}
    while not text.startswith("}"):
        name = re.match(r"[{ ,]+([A-Za-z0-9_.]+\??)", text)
        assert name, text
        inner, text = _parse(text[name.end() :])
        shape[OPEN if name[1].isupper() else name[1]] = inner
    return shape, text[1:]


def differences(value: Any, shape: Shape, at: str) -> Iterator[str]:
    """What an object has that the page does not list, and the other way round."""
    if isinstance(value, list):
        for inner in value:
            yield from differences(inner, shape[0] if isinstance(shape, list) else shape, f"{at}[]")
    elif isinstance(value, dict):
        if not isinstance(shape, dict):
            yield f"{at} is an object"
            return
        plain = {name.rstrip("?"): inner for name, inner in shape.items()}
        for name, inner in value.items():
            if name in plain or OPEN in plain:
                yield from differences(inner, plain.get(name, plain.get(OPEN)), f"{at}.{name}")
            elif (at, name) != ("", "schema"):
                yield f"{at}.{name} is not told"
        yield from (
            f"{at}.{name} is not there" for name in shape.keys() - value.keys() if name[-1] != "?" != name != OPEN
        )


def names_in(shape: Shape) -> Iterator[str]:
    if isinstance(shape, list):
        yield from names_in(shape[0])
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            if name != OPEN:
                yield name.rstrip("?")
            yield from names_in(inner)


def described() -> Counter[str]:
    first = [re.match(r"\| (`[^|]*`) \|", line) for line in PAGE.splitlines()]
    return Counter(name for line in first if line for name in re.findall(r"`([a-z0-9_]+)`", line[1]))


def shape_of(command: str, row: dict[str, Any]) -> str:
    if row.get("type") in ("status", "warning", "error"):
        return f"event {row['type']}"
    if "count" in row:
        return "query --batch, summary"
    return command.partition(" (")[0]


def test_every_name_has_one_meaning() -> None:
    told = described()
    assert [name for name, count in told.items() if count > 1] == []
    used = {name for shape in shapes().values() for name in names_in(shape)}
    assert used - set(told) == set()
    assert set(told) - used - {"schema"} == set()


def test_every_command_speaks_as_the_page_says(built: Path, fitted: Path, tiny: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(built / "store", tmp_path / "store"))
    known, seen = shapes(), set()
    wrong: dict[str, set[str]] = {}
    for command, rows in every_command(tmp_path, store, fitted, tiny).items():
        for row in rows:
            assert row["schema"] == 1
            where = shape_of(command, row)
            seen.add(where)
            facts = row if "type" in known[where] else {name: row[name] for name in row if name != "type"}
            wrong.setdefault(command, set()).update(differences(facts, known[where], ""))
    assert {command: found for command, found in wrong.items() if found} == {}
    assert known.keys() - seen == set()
