"""Decoding one token at a time: what a step is, and which way of taking it serves a model here.

A step reads every weight once for a single row, so that it is bound by memory where a prefill is bound by arithmetic:
other code is the fast one for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvtool.core.model.stepping.cuda_graph import CudaGraphStepper
from kvtool.core.model.stepping.engines import engine_of
from kvtool.core.model.stepping.native import NativeStepper
from kvtool.core.model.stepping.plain import TorchStepper

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache


class Stepper(Protocol):
    """Appends tokens to one prompt cache.

    Between two steps the cache is whole: it holds the rows of all tokens that were given, and whoever else reads or
    extends it may go on from there.

    Attributes
    ----------
    name : how steps are computed: "native", "torch".
    why : the reason, where it is not the fastest way that there is.
    """

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def step(self, token: int) -> torch.Tensor:
        """Append one token to the cache; the logits behind it, float32 `[vocabulary]`, on the model's device.

        They are the caller's until the next step, which may write them anew.
        """


def stepper_for(decoder: Decoder, cache: PromptCache) -> Stepper:
    """Make the fastest stepper that a model has on its device."""
    if decoder.hooked:
        return TorchStepper(decoder, cache, "someone listens to the model's layers")
    if cache.dropped and any(kind.window for kind in decoder.kinds):
        return TorchStepper(decoder, cache, "windows over rows that do not stand in their places")
    if decoder.keeps_states:
        return TorchStepper(decoder, cache, "the model keeps states")
    if decoder.device.startswith("cuda"):
        return CudaGraphStepper(decoder, cache)
    engine = engine_of(decoder)
    if isinstance(engine, str):
        return TorchStepper(decoder, cache, engine)
    return NativeStepper(decoder, engine, cache)


def step_together(steppers: Sequence[Stepper], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Append a token to each of several caches, no two of them the same; the logits behind each as from `step`.

    Those of one model in machine code go through it together, which reads its weights once for all of them; the others
    one by one. What comes out of a cache does not depend on the others, not in one bit.
    """
    found: dict[int, torch.Tensor] = {}
    for group in _groups(steppers):
        logits = NativeStepper.step_together([*group.values()], [tokens[at] for at in group])
        found |= dict(zip(group, logits, strict=True))
    return [found[at] if at in found else one.step(tokens[at]) for at, one in enumerate(steppers)]


def _groups(steppers: Sequence[Stepper]) -> list[dict[int, NativeStepper]]:
    """Those that can go together, by their places; whoever is alone, or not trusted yet, is in none."""
    by_model: dict[int, dict[int, NativeStepper]] = {}
    for at, one in enumerate(steppers):
        if isinstance(one, NativeStepper) and one.engine.verdict == "":
            by_model.setdefault(id(one.engine), {})[at] = one
    return [group for group in by_model.values() if len(group) > 1]
