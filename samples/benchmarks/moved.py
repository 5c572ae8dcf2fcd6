"""What a prompt loses that reuses rows of an earlier prompt, where its text has moved.

    python samples/benchmarks/moved.py [--model MODEL] [--tokens N] [--fusion reuse,epic-16,epic-64,union]

Two prompts of an agent that has read Python's own modules, the second of which differs near its top, in the middle, or
in its order. Runs of the second prompt that stand in the first one are taken from its KV cache, with their keys rotated
to their new places; each mode recomputes some rows of them; all else is computed. Full prefill of the second prompt is
the reference: KL of the next token in nats, the mean over 24 greedy tokens, and how many of them are the same.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.identity import ids_digest
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.codec.levels import RAW
from kvtool.core.common.types import Ids
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt import Message, message_tokens

WIDTH = 32  # tokens of the shortest run that is reused
NEW = 24  # tokens of an answer
MODULES = (
    "textwrap",
    "shlex",
    "fnmatch",
    "bisect",
    "heapq",
    "queue",
    "sched",
    "statistics",
    "configparser",
    "argparse",
)
QUESTIONS = (
    "Which function should I change to break lines at hyphens, and why?",
    "Say in one sentence what the second file does.",
    "Which error is raised when the input is wrong? Name it.",
)
SYSTEM = (
    "{}You are a coding agent. You read files with tools, and answer questions about the project. Be exact and short."
)
TOOLS = ("read_file(path): the text of a file", "grep(pattern): lines", "run(command): its output", "edit(path, text)")
HEADS = (
    "Date: 2026-11-27 10:31. Branch main, clean. Build 4411.\n",
    "Date: 2026-11-28 09:12. Branch main, clean. Build 4502.\n",
    "Date: 2026-11-28 09:12. Branch feature/units, 3 files modified: split.py, walk.py, tests. Build 4502.\n",
)
Files = Sequence[tuple[str, str]]


def messages(files: Files, question: str, head: str = HEADS[0], tools: Sequence[str] = TOOLS) -> list[Message]:
    system = SYSTEM.format(head) + "\nTools:\n" + "\n".join(tools)
    read = [
        (role, text) for name, body in files for role, text in (("assistant", f"read_file({name!r})"), ("user", body))
    ]
    return [("system", system), ("user", "Look at these files."), *read, ("user", question)]


def changed(files: Files) -> Files:
    """Replace a line in the middle of the first file."""
    (name, body), *others = files
    lines = body.splitlines()
    lines[len(lines) // 2] = "# The limit is 4096 now, and the old name is gone; see the notes of the last release."
    return [(name, "\n".join(lines)), *others]


CASES: Mapping[str, Callable[[Files, str], list[Message]]] = {
    "first line, same length": lambda files, asked: messages(files, asked, HEADS[1]),
    "first line, longer": lambda files, asked: messages(files, asked, HEADS[2]),
    "a tool less": lambda files, asked: messages(files, asked, tools=TOOLS[1:]),
    "a line of the first file": lambda files, asked: messages(changed(files), asked),
    "the first file dropped": lambda files, asked: messages(files[1:], asked),
    "files in another order": lambda files, asked: messages(files[::-1], asked),
    "another agent, two files": lambda files, asked: [("system", "You review code."), *messages(files[1:3], asked)[1:]],
}


def files_of(tokens: int) -> Files:
    """Modules whose texts together have about so many tokens, at 4 characters a token."""
    each = 4 * tokens // len(MODULES[:4])
    return [(f"{name}.py", inspect.getsource(import_module(name))[:each]) for name in MODULES[:4]]


def runs(ids: Ids, before: Ids) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and earlier start of the runs of a prompt that stand in the one before it."""
    known: dict[Ids, list[int]] = {}
    for at in range(len(before) - WIDTH + 1):
        known.setdefault(tuple(before[at : at + WIDTH]), []).append(at)
    start = 0
    while start < len(ids):
        best = max(
            (length(ids[start:], before[at:]), -at) for at in [*known.get(tuple(ids[start : start + WIDTH]), ()), 0]
        )
        if best[0] >= (WIDTH if start else 1):
            yield start, start + best[0], -best[1]
        start += max(best[0], 1) if best[0] >= WIDTH or not start else 1


def length(one: Ids, other: Ids) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def laid_out(ids: Ids, before: Ids, kv: ChunkKV) -> tuple[Plan, MemorySource]:
    """Plan a prompt with what an earlier one has computed. The last run ends before the last token."""
    parts, held, end = list[Candidate](), dict[bytes, ChunkKV](), 0
    for start, stop, at in runs(ids[:-1], before):
        if start > end or (not parts and start):
            parts.append(Candidate(ids[end:start]))
        name = b"%d" % start
        held[name] = ChunkKV(*([side[:, at : at + stop - start] for side in sides] for sides in (kv.keys, kv.values)))
        parts.append(Candidate(ids[start:stop], name, ids_digest(before[:at]), RAW))
        end = stop
    return build_plan(parts[0], parts[1:], ids[end:]), MemorySource(held)


def log_probs(decoder: Decoder, logits: torch.Tensor, cache: object, script: Sequence[int]) -> torch.Tensor:
    return torch.cat([logits[None], decoder.extend(script, cache)]).double().log_softmax(-1)


def answered(decoder: Decoder, ids: Ids) -> tuple[list[int], torch.Tensor]:
    """Answer greedily by full prefill: the tokens, and the log-probabilities at each."""
    logits, cache = decoder.prefill(ids, NEW)
    script, rows = list[int](), [logits[None]]
    for _ in range(NEW - 1):
        script.append(int(rows[-1].argmax()))
        rows.append(decoder.extend(script[-1:], cache))
    return script, torch.cat(rows).double().log_softmax(-1)


def selector(name: str) -> Selector:
    kind, _, number = name.partition("-")
    return {"reuse": Reuse, "epic": lambda: Epic(int(number or 16)), "union": lambda: Union(int(number or 15) / 100)}[
        kind
    ]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--fusion", default="reuse,epic-16,epic-64,union")
    given = parser.parse_args()
    decoder = Decoder(
        load_model(resolve(given.model), dtype="bfloat16", arithmetic="float32", packed=True), kv_dtype=torch.bfloat16
    )
    tokenizer, files = decoder.loaded.tokenizer, files_of(given.tokens)
    for case, second in CASES.items():
        found = dict[str, list[tuple[float, float, float, float]]]()
        for question in QUESTIONS:
            before, ids = (message_tokens(tokenizer, made(files, question)) for made in (messages, second))
            assert before is not None
            assert ids is not None
            (kv,) = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(before)])
            plan, source = laid_out(ids, before, kv)
            script, reference = answered(decoder, ids)
            moved = len(plan.hit_rows().nonzero()) / len(ids)
            for name in given.fusion.split(","):
                fused = fuse(decoder, plan, selector(name), source, NEW)
                other = log_probs(decoder, fused.logits, fused.cache, script)
                kl = F.kl_div(other, reference, reduction="none", log_target=True).sum(-1)
                same = (other.argmax(-1) == reference.argmax(-1)).double().mean()
                computed = sum(fused.tokens.rows) / len(fused.tokens.rows) / len(ids)
                found.setdefault(name, []).append((float(kl.mean()), float(same), computed, moved))
        for name, rows in found.items():
            kl, same, computed, moved = map(mean, zip(*rows, strict=True))
            measured = f"KL {kl:.4f}  same {same:4.0%}  rows {computed:4.0%}"
            print(f"{case:26} {len(ids):6} tokens, {moved:4.0%} moved  {name:8} {measured}", flush=True)


if __name__ == "__main__":
    main()
