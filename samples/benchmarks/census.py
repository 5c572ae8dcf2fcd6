"""How much of an agent's prompts a server has computed before, and whether it stands where it stood.

    python samples/benchmarks/census.py FILE.traj … [--observations 5]

FILE: a session of SWE-agent (`history`), or JSON lines of chat requests (`messages`), a session a file. Each prompt is
compared with all earlier ones of its session: `exact` tokens are its longest beginning that one of them has, `moved`
ones are in runs of at least 32 that one of them has elsewhere, the rest is new. `--observations N`: as SWE-agent sends
it by default, all outputs of tools but the last N are replaced by a line that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.common.types import Ids
from samples.benchmarks.moved import WIDTH, length

Message = Mapping[str, Any]


def sessions(path: Path, observations: int | None) -> Iterator[Sequence[Message]]:
    """Yield the messages of each request of a session."""
    text = path.read_text("utf-8")
    if path.suffix != ".traj":
        yield from (json.loads(line)["messages"] for line in text.splitlines() if line.strip())
        return
    history = json.loads(text)["history"]
    for number, message in enumerate(history):
        if message["role"] == "assistant" and number and not message.get("is_demo"):
            yield shortened(history[:number], observations)


def shortened(messages: Sequence[Message], observations: int | None) -> Sequence[Message]:
    if observations is None:
        return messages
    outputs = [
        n for n, one in enumerate(messages) if n > 1 and one["role"] in ("user", "tool") and not one.get("is_demo")
    ]
    old = {*outputs[: len(outputs) - observations]} if len(outputs) > observations else set()
    said = "Old environment output: ({} lines omitted)"
    return [
        {**one, "content": said.format(str(one["content"]).count("\n") + 1)} if number in old else one
        for number, one in enumerate(messages)
    ]


def token_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> Ids:
    texts = (one["content"] if isinstance(one["content"], str) else json.dumps(one["content"]) for one in messages)
    parts = [f"<|im_start|>{one['role']}\n{text}<|im_end|>\n" for one, text in zip(messages, texts, strict=True)]
    return tuple(token for each in tokenizer.encode_batch(parts, add_special_tokens=False) for token in each.ids)


def counted(prompts: Sequence[Ids]) -> Counter[str]:
    counts, known = Counter[str](), dict[Ids, tuple[int, int]]()
    for number, ids in enumerate(prompts):
        exact = start = max((length(ids, earlier) for earlier in prompts[:number]), default=0)
        moved = 0
        while start + WIDTH <= len(ids):
            place = known.get(ids[start : start + WIDTH])
            same = length(ids[start:], prompts[place[0]][place[1] :]) if place else 0
            moved, start = moved + same, start + max(same, 1)
        if number:
            counts.update(exact=exact, moved=moved, new=len(ids) - exact - moved)
        known.update((ids[at : at + WIDTH], (number, at)) for at in range(len(ids) - WIDTH + 1))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--observations", type=int)
    given = parser.parse_args()
    tokenizer, total = Tokenizer.from_file(str(resolve("smollm2").folder / "tokenizer.json")), Counter[str]()
    for path in given.files:
        counts = counted([token_ids(tokenizer, one) for one in sessions(path, given.observations)])
        total += counts
        print(f"{path.name[-60:]:60} {shares(counts)}")
    print(f"{'all':60} {shares(total)}")


def shares(counts: Counter[str]) -> str:
    total = counts.total() or 1
    return f"{counts.total():9,} tokens: " + ", ".join(
        f"{counts[kind] / total:4.0%} {kind}" for kind in ("exact", "moved", "new")
    )


if __name__ == "__main__":
    main()
