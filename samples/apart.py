"""What recurrent hybrids lose by chunks computed apart: small ones, trained here to find values by their keys.

    python samples/apart.py [SHAPE …] [--steps N] [--prompts N]

No pretrained hybrid is at hand, and random weights remember nothing. So each shape is trained for some minutes on
prompts of chunks, each a list of keys with their values, in which values are asked for. Its chunks are then computed
alone behind a lead-in, and put together in several ways; questions are held against full prefill.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvtool.core.cache.stretches import Place
from kvtool.core.common.types import Ids
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.fusion.apart import Stored, fuse_apart
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.stretch import Found, NewStretch
from kvtool.core.model.alone import carried
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.files import ModelFiles
from kvtool.core.model.load import Loaded, quiet
from kvtool.core.records.parts import encode_part
from kvtool.core.session.alone import AloneMaker
from kvtool.core.session.identity import LeadInIds, StoreIdentity

_KEYS, _VALUES = range(16, 40), range(40, 64)
_BOS, _LIST, _ASK = 0, 2, 3
_CHUNKS, _PAIRS = 3, 5  # of a prompt, and of a chunk
_BATCH, _ASKED = 24, 12
_RATE = {"lfm2": 3e-3, "bamba": 3e-3, "olmo-hybrid": 2e-3}
_EASY = 0.4  # share of the steps that have two chunks of three pairs
_SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}
_DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32},
}


def _config(name: str) -> Any:
    from transformers import BambaConfig, Lfm2Config, OlmoHybridConfig

    if name == "olmo-hybrid":
        kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
        return OlmoHybridConfig(**_SHAPE, **_DELTA, layer_types=kinds)
    if name == "bamba":
        return BambaConfig(**_SHAPE, **_MAMBA, attn_layer_indices=[2])
    return Lfm2Config(**_SHAPE, layer_types=["conv", "conv", "full_attention", "conv"])


SHAPES = ("lfm2", "bamba", "olmo-hybrid")


@dataclass(frozen=True)
class Prompt:
    """Chunks, and every key with its value."""

    chunks: tuple[Ids, ...]
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def drawn(cls, draw: torch.Generator, chunks: int, pairs: int) -> Prompt:
        keys = (torch.randperm(len(_KEYS), generator=draw)[: chunks * pairs] + _KEYS[0]).tolist()
        values = torch.randint(_VALUES[0], _VALUES[-1] + 1, (chunks * pairs,), generator=draw).tolist()
        both = tuple(zip(keys, values, strict=True))
        lists = [both[start : start + pairs] for start in range(0, len(both), pairs)]
        return cls(tuple((_LIST, *(one for pair in each for one in pair)) for each in lists), both)


def _batch(draw: torch.Generator, chunks: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with values asked for, and what is to be said behind each token (-100: anything)."""
    rows, wanted = [], []
    for _ in range(_BATCH):
        prompt = Prompt.drawn(draw, chunks, pairs)
        ids = [_BOS, *(one for chunk in prompt.chunks for one in chunk)]
        said = [-100] * len(ids)
        for at in torch.randint(0, len(prompt.pairs), (_ASKED,), generator=draw).tolist():
            key, value = prompt.pairs[at]
            ids += [_ASK, key, value]
            said += [-100, -100, value]
        rows.append(ids)
        wanted.append(said)
    return torch.tensor(rows), torch.tensor(wanted)


def trained(name: str, steps: int) -> Any:
    """A model of a shape that finds values by their keys."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE[name], weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE[name] * min(1.0, step / 50) * (1 - step / steps)
        ids, wanted = _batch(draw, *((2, 3) if step < _EASY * steps else (_CHUNKS, _PAIRS)))
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, wanted[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"{name}: step {step} of {steps}, loss {loss.item():.3f}", file=sys.stderr)
    return model.eval().requires_grad_(False)


# ---- ways to put states together ---------------------------------------------------------------------------------

Way = Callable[[torch.Tensor], torch.Tensor]  # from what a chunk carries of a state to what is taken for it


def _none(carry: torch.Tensor) -> torch.Tensor:
    """Nothing of the state before: the state is the last chunk's behind its lead-in, as LinearKV has it."""
    return torch.zeros_like(carry)


def _one_number(carry: torch.Tensor) -> torch.Tensor:
    """One number a head, which is all that a store would have to keep."""
    return carry.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


WAYS: dict[str, Way] = {"composed": lambda carry: carry, "one number": _one_number, "last chunk": _none}


def changed(made: NewStretch, maker: AloneMaker, way: Way) -> NewStretch:
    """What is kept of a chunk, had something else been taken for what it carries."""
    parts: dict[Place, dict[str, torch.Tensor]] = {}
    for place, tensors in made.parts.items():
        parts[place] = dict(tensors)
        for name in [name for name in tensors if name.startswith("carried")]:
            own, lead = f"recurrent {name.split()[1]}", maker.behind.states(place[1])
            before = lead["recurrent", int(name.split()[1])]
            taken = way(tensors[name])
            parts[place][name] = taken
            parts[place][own] = tensors[own] + carried(tensors[name], before) - carried(taken, before)
    return replace(made, parts=parts)


# ---- measuring ---------------------------------------------------------------------------------------------------


def measured(model: Any, prompts: int) -> Iterator[tuple[str, float, float]]:
    """For each way of answering: its name, the share of right values, and KL from full prefill in nats."""
    decoder = Decoder(Loaded(model, None, ModelFiles("trained", Path(), "apart"), "cpu", "float32", "trained", 0.0))
    draw = torch.Generator().manual_seed(77)
    lead_in = (_BOS, *Prompt.drawn(draw, _CHUNKS, _PAIRS).chunks[0])
    identity = StoreIdentity(
        *("trained", "apart", "float32"), (_BOS,), (), LeadInIds("warm", lead_in), SplitSettings(), keeps_states=True
    )
    maker = AloneMaker(identity, decoder)
    right: dict[str, list[bool]] = defaultdict(list)
    lost: dict[str, list[float]] = defaultdict(list)
    for _ in range(prompts):
        prompt = Prompt.drawn(draw, _CHUNKS, _PAIRS)
        made = [maker.chunk(ids) for ids in prompt.chunks]
        ways = {name: [maker.beginning(), *(changed(one, maker, way) for one in made)] for name, way in WAYS.items()}
        for at in torch.randperm(len(prompt.pairs), generator=draw)[:6].tolist():
            key, value = prompt.pairs[at]
            full, _ = decoder.prefill([_BOS, *(one for ids in prompt.chunks for one in ids), _ASK, key])
            answers = {"full": full, "no chunks": decoder.prefill([_BOS, _ASK, key])[0]}
            for name, stretches in ways.items():
                for selector in (Reuse(), Epic(link_tokens=4)):
                    answers[f"{selector.name}, {name}"] = fused(decoder, lead_in, prompt, key, selector, stretches)
            for name, logits in answers.items():
                right[name].append(int(logits.argmax()) == value)
                lost[name].append(_kl(full, logits))
    yield from ((name, sum(right[name]) / len(right[name]), sum(lost[name]) / len(lost[name])) for name in right)


def fused(
    decoder: Decoder, lead_in: Ids, prompt: Prompt, key: int, selector: Selector, stretches: Sequence[NewStretch]
) -> torch.Tensor:
    """A question's logits over chunks that were computed apart."""
    parts = {(one.id, place): encode_part(tensors) for one in stretches for place, tensors in one.parts.items()}
    plan = build_plan(Candidate((_BOS,)), [Candidate(ids) for ids in prompt.chunks], (_ASK, key))
    found = Found(tuple(one.id for one in stretches), tuple(one.info for one in stretches))

    def read(stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(parts[stretch, place]))

    return fuse_apart(decoder, plan, selector, Stored(found, lead_in), read).logits


def _kl(full: torch.Tensor, other: torch.Tensor) -> float:
    expected, own = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((expected.exp() * (expected - own)).sum())


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--steps", type=int, default=3000, help="of training (default: 3000)")
    parser.add_argument("--prompts", type=int, default=40, help="to measure with, six questions each (default: 40)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for shape in asked.shapes or SHAPES:
        started = time.process_time()
        model = trained(shape, asked.steps)
        took = time.process_time() - started
        print(f"\n{shape}, trained for {asked.steps:,} steps in {took:,.0f} s of CPU time\n")
        print("| question | right values | KL, nats |")
        print("| --- | --- | --- |")
        for name, right, lost in measured(model, asked.prompts):
            print(f"| {name} | {right:.1%} | {lost:.4f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
