"""What rounding loses of a recurrent hybrid's stored beginnings: of their rows, of their states, of another machine's.

    python samples/kept_states.py [SHAPE …] [--steps N] [--prompts N]

No pretrained hybrid is at hand, so the small ones of `apart.py` are trained here to find values by their keys. Each
prompt is answered once by a machine that computes in bfloat16 and once by one of float32, over the same weights; what
they store of it is kept in several formats, and the next question stands on that. KL divergence (nats, mean and worst
of all tokens behind the beginning) is from full prefill in the same arithmetic.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from apart import _ASK, _BOS, _CHUNKS, _PAIRS, SHAPES, Prompt, trained

from kvtool.core.cache.stretches import Place
from kvtool.core.fusion.chain import fuse_chain
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.stretch import Found, NewStretch
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.files import ModelFiles
from kvtool.core.model.load import Loaded
from kvtool.core.records.parts import encode_part
from kvtool.core.session.quoting import quoted

_QUOTED = 6  # keys and values behind the beginning
WIDE, HALF = torch.float32, torch.bfloat16
# What computes the question, what has made the stretches, what their rows are kept in, and their states.
CASES = (
    *((WIDE, WIDE, rows, states) for rows in (WIDE, HALF) for states in (WIDE, HALF)),
    (WIDE, HALF, HALF, WIDE),
    (HALF, HALF, HALF, WIDE),
    (HALF, HALF, HALF, HALF),
    (HALF, WIDE, HALF, WIDE),
)
Parts = dict[tuple[bytes, Place], bytes]


def machine(model: Any, arithmetic: torch.dtype) -> Decoder:
    """The model, its weights rounded to bfloat16, as a machine of an arithmetic has it."""
    own = copy.deepcopy(model)
    for weight in own.parameters():
        weight.data = weight.data.to(HALF).to(arithmetic)
    own.config.dtype = arithmetic
    files = ModelFiles("trained", Path(), "kept")
    # What is rounded, and how, is decided here, not by the format that a store would keep.
    return Decoder(Loaded(own, None, files, "cpu", "float32", "trained", 0.0), kv_dtype=arithmetic)


def made(decoder: Decoder, plan: Plan) -> tuple[NewStretch, ...]:
    """What a machine stores of a prompt."""
    names = tuple(bytes([number]) * 20 for number in range(len(plan.segments) - 1))
    return fuse_chain(decoder, plan, Prefix(), Found(names, (None,) * len(names)), _nothing).new


def _nothing(stretch: bytes, place: Place) -> memoryview:
    raise AssertionError("nothing is stored yet")


def kept(stretches: Sequence[NewStretch], rows: torch.dtype, states: torch.dtype) -> Parts:
    """Their bytes in these formats."""
    formats = {"rows": rows, "state": states}
    return {
        (one.id, place): encode_part({name: tensor.to(formats[place[0]]) for name, tensor in tensors.items()})
        for one in stretches
        for place, tensors in one.parts.items()
    }


def behind(
    decoder: Decoder, plan: Plan, stretches: Sequence[NewStretch], parts: Parts, script: list[int]
) -> torch.Tensor:
    """Log-probabilities behind a stored beginning."""
    found = Found(tuple(one.id for one in stretches), tuple(one.info for one in stretches))

    def read(stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(parts[stretch, place]))

    fused = fuse_chain(decoder, plan, Prefix(), found, read, reserve=len(script)).fused
    return quoted(decoder, fused.logits, fused.cache, script)


def measured(model: Any, prompts: int) -> Iterator[tuple[str, ...]]:
    """A row of the table for each case."""
    machines = {arithmetic: machine(model, arithmetic) for arithmetic in (WIDE, HALF)}
    draw = torch.Generator().manual_seed(77)
    lost: dict[Any, list[torch.Tensor]] = defaultdict(list)
    size: dict[Any, int] = {}
    for _ in range(prompts):
        prompt = Prompt.drawn(draw, _CHUNKS, _PAIRS)
        asked = torch.randperm(len(prompt.pairs), generator=draw)[:_QUOTED].tolist()
        first, *script = [one for at in asked for one in (_ASK, *prompt.pairs[at])]
        plan = build_plan(Candidate((_BOS,)), [Candidate(ids) for ids in prompt.chunks], (first,))
        stretches = {arithmetic: made(decoder, plan) for arithmetic, decoder in machines.items()}
        full = {}
        for arithmetic, decoder in machines.items():
            logits, cache = decoder.prefill(plan.ids, len(script))
            full[arithmetic] = quoted(decoder, logits, cache, script)
        for case in CASES:
            computes, maker, rows, states = case
            parts = kept(stretches[maker], rows, states)
            own = behind(machines[computes], plan, stretches[maker], parts, script)
            lost[case].append((full[computes].exp() * (full[computes] - own)).sum(-1))
            size[case] = sum(map(len, parts.values()))
    for case in CASES:
        loss = torch.cat(lost[case])
        names = [str(kind).removeprefix("torch.") for kind in case]
        yield (*names, f"{float(loss.mean()):.1e}", f"{float(loss.max()):.1e}", f"{size[case] / 1e3:.1f}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--steps", type=int, default=1200, help="of training (default: 1200)")
    parser.add_argument("--prompts", type=int, default=40, help="to measure with (default: 40)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for shape in asked.shapes or SHAPES:
        model = trained(shape, asked.steps)
        print(f"\n{shape}, trained for {asked.steps:,} steps\n")
        print("| computes in | made by | rows in | states in | KL, mean | KL, worst | kB of a prompt |")
        print("| --- " * 7 + "|")
        for row in measured(model, asked.prompts):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
