"""A chunk of a model that keeps states, computed behind a lead-in alone, so that it can stand anywhere in a prompt.

Its keys and values are those of the layers that attend, as everywhere. Of a layer that keeps a state three things are
kept, by which the state behind the chunk follows from the one before it, the inputs of the layer being what they were
alone:

- the window of its convolution, which is the chunk's own last tokens;
- what the chunk adds to a recurrent state;
- what the chunk *carries* of the state before it. All recurrences here are linear in it: a head's state is multiplied
  by one number (Mamba-2, arXiv 2405.21060, section 3) or by a matrix (Gated DeltaNet, arXiv 2412.06464, section 3: a
  product of decays and of I - βkk'). Neither is known by family: the layer is run once more, from a state that is
  larger by the identity, and the difference is what was carried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError
from kvtool.core.model.attention import Rows
from kvtool.core.model.between import for_this_pass
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.modules import recurrences_of
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.states import CARRIED, CONV, RECURRENT, StateCache, StateLayer, States
from kvtool.core.model.support import ONLY_EXACTLY

# How far rounding leaves a carried matrix that is one number from being so; states are float32 in most models.
_ONE_NUMBER = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
_PROBE_SEED = 0


@dataclass(frozen=True, slots=True)
class Alone:
    """What a chunk gives by itself, on the CPU.

    Attributes
    ----------
    rows : by layer, un-rotated keys and values `[1, kv_heads, tokens, head_dim]`.
    states : by layer, the convolution's window `[1, channels, kernel]`, what is added to a recurrent state
        `[1, heads, a, b]`, and what is carried of the one before, `[1, heads, 1, 1]` or `[1, heads, a, a]`.
    """

    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]
    states: dict[int, States]


class Behind:
    """What chunks are computed behind: a lead-in's keys, values and states, computed once.

    Attributes
    ----------
    ids : its tokens, at least one.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int]) -> None:
        self.ids: Ids = tuple(ids)
        _, cache = decoder.prefill(self.ids)
        assert isinstance(cache, StateCache)
        self._cache = cache

    def new_cache(self, decoder: Decoder, tokens: int) -> StateCache:
        """A cache that stands behind it, with room for so many tokens more."""
        cache = decoder.new_cache(len(self.ids) + tokens)
        assert isinstance(cache, StateCache)
        cache.set_length(len(self.ids))
        for own, there in zip(self._cache.buffers, cache.buffers, strict=True):
            if isinstance(own, BufferLayer):
                for side, target in zip(own.view(), there.view(), strict=True):
                    target.copy_(side)
            if isinstance(own, StateLayer):
                there.take(own.states())
        return cache

    def states(self, layer: int) -> States:
        """A layer's state behind it."""
        states: States = self._cache.buffers[layer].states()
        return states


@torch.inference_mode()
def compute_alone(decoder: Decoder, behind: Behind, ids: Sequence[int]) -> Alone:
    """Compute a chunk behind a lead-in.

    Raises
    ------
    ModelError : keys of the model cannot be moved, or its states are not linear in what stood before.
    """
    watch = _Carrying(decoder, behind, [_identity])
    cache = _passed(decoder, behind, ids, watch)
    lead, stop = len(behind.ids), len(behind.ids) + len(ids)
    undo = decoder.rotary.table(torch.arange(lead, stop, device=decoder.device)).inverse()
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    states: dict[int, States] = {}
    for number, layer in enumerate(cache.buffers):
        if isinstance(layer, BufferLayer):
            keys = decoder.rotary.rotate(layer.keys[:, :, lead:stop], undo, len(rows))
            rows[number] = keys.cpu(), layer.values[:, :, lead:stop].to("cpu", copy=True)
        if isinstance(layer, StateLayer):
            states[number] = _own(layer.states(), behind.states(number), watch.differences.get(number, []))
    return Alone(rows, states)


def follow(before: Mapping[tuple[str, int], torch.Tensor], own: States, tokens: int) -> States:
    """The state behind a chunk, from the one before it and what the chunk gives by itself.

    Parameters
    ----------
    before : empty at a prompt's very beginning, where a window is of zeros.
    own : as `Alone` has it.
    tokens : of the chunk; a shorter one than the window of a convolution leaves some of the window before.
    """
    states: States = {}
    for (what, number), tensor in own.items():
        there = before.get((what, number))
        if what == CONV:
            joined = torch.cat([torch.zeros_like(tensor) if there is None else there, tensor[..., -tokens:]], -1)
            states[what, number] = joined[..., -tensor.shape[-1] :]
        elif what == RECURRENT:
            states[what, number] = tensor if there is None else tensor + carried(own[CARRIED, number], there)
    return states


def carried(carry: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What is left of a state `[1, heads, a, b]` behind a chunk."""
    return (carry * state if carry.shape[-1] == 1 else carry @ state.to(carry.dtype)).to(state.dtype)


@torch.inference_mode()
def carries_wrongly(decoder: Decoder, behind: Behind, ids: Sequence[int]) -> float:
    """How far what is carried of a state drawn at random is from what the layers themselves make of it.

    Returns
    -------
    The largest difference of a layer over the largest number of the drawn state; 0 without recurrences.
    """
    watch = _Carrying(decoder, behind, [_identity, _drawn])
    _passed(decoder, behind, ids, watch)
    worst = 0.0
    for found in watch.differences.values():
        for of_identity, of_drawn in found:
            drawn = _drawn(of_drawn)
            off = (carried(_carry(of_identity), drawn) - of_drawn).abs().max() / drawn.abs().max()
            worst = max(worst, float(off)) if torch.isfinite(off) else float("inf")
    return worst


def _passed(decoder: Decoder, behind: Behind, ids: Sequence[int], watch: _Carrying) -> StateCache:
    """The cache behind a lead-in and a chunk; the recurrent layers are watched."""
    cache = behind.new_cache(decoder, len(ids))
    lead, stop = len(behind.ids), len(behind.ids) + len(ids)
    cache.set_length(stop)
    hooks = watch.hooked(cache)
    try:
        decoder.walk(list(ids), Rows.of(torch.arange(lead, stop), decoder.device), cache)
    finally:
        for hook in hooks:
            hook.remove()
    return cache


@dataclass(slots=True)
class _Carrying:
    """Runs each recurrent layer again from other states than the lead-in's, and keeps what comes of it.

    Attributes
    ----------
    offsets : what is added to a state, made of one like it.
    differences : by layer, for each of its states what each offset has changed behind the chunk.
    """

    decoder: Decoder
    behind: Behind
    offsets: Sequence[Any]
    differences: dict[int, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)

    def hooked(self, cache: StateCache) -> list[Any]:
        """Listen to the layers; the hooks are to be removed."""
        modules = recurrences_of(self.decoder.layers)
        return [
            module.register_forward_hook(for_this_pass(self._hook(number, cache)), with_kwargs=True)
            for number, module in modules.items()
        ]

    def _hook(self, layer: int, cache: StateCache) -> Any:
        def again(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if not any(one is cache for one in (*args, *kwargs.values())):
                return  # another thread's pass through the same layers
            after = cache.buffers[layer].states()
            numbers = [number for what, number in after if what == RECURRENT]
            changed = [self._changed(module, args, kwargs, cache, layer, offset) for offset in self.offsets]
            self.differences[layer] = [
                tuple(states[RECURRENT, number] - after[RECURRENT, number] for states in changed) for number in numbers
            ]

        return again

    def _changed(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cache: StateCache, layer: int, offset: Any
    ) -> States:
        """The layer's state behind the chunk, had it been another one before it."""
        other = self.decoder.new_cache(0)
        assert isinstance(other, StateCache)
        before = self.behind.states(layer)
        other.buffers[layer].take(
            {key: state if key[0] == CONV else state + offset(state) for key, state in before.items()}
        )
        module.forward(
            *(other if one is cache else one for one in args),
            **{name: other if one is cache else one for name, one in kwargs.items()},
        )
        states: States = other.buffers[layer].states()
        return states


def _identity(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(*like.shape[-2:], dtype=like.dtype, device=like.device).expand_as(like)


def _drawn(like: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(_PROBE_SEED)
    return torch.randn(like.shape, generator=draw, dtype=torch.float32).to(like)


def _own(after: States, before: States, differences: Sequence[tuple[torch.Tensor, ...]]) -> States:
    """What a chunk gives by itself, from the states behind and before it."""
    own = {key: state.to("cpu", copy=True) for key, state in after.items()}
    for number, (difference, *_) in enumerate(differences):
        carry = own[CARRIED, number] = _carry(difference).to("cpu", copy=True)
        own[RECURRENT, number] -= carried(carry, before[RECURRENT, number].cpu())
    if any((CARRIED, number) not in own for what, number in after if what == RECURRENT):
        what = "what the model's states carry of those before is not known here"
        raise ModelError(f"{what}; that would need a probe for such a layer", ONLY_EXACTLY)
    return own


def _carry(difference: torch.Tensor) -> torch.Tensor:
    """What is carried, from what the identity `[a, b]` has become of.

    Raises
    ------
    ModelError : there are fewer columns than rows, so that one identity does not tell of all rows.
    """
    height, width = difference.shape[-2:]
    one = difference[..., :1, :1]
    if (difference - one * _identity(difference)).abs().max() <= _ONE_NUMBER[difference.dtype]:
        return one
    if width < height:
        needed = "that would need as many columns as rows, which tell what becomes of each"
        raise ModelError(f"states of {height} x {width} are carried by more than one number; {needed}", ONLY_EXACTLY)
    return difference[..., :height]
