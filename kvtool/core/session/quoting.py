"""How far a prompt's cache is from another's: the model is led through what stands in the prompt once more.

Who cannot find in a cache what stood in it cannot quote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

_QUOTED = 32  # first tokens of each chunk that the model is led through


def quotation(chunks: Sequence[Ids]) -> tuple[int, list[int]]:
    """The first token of it, which ends the prompt, and those that follow."""
    first, *script = [token for ids in chunks for token in ids[:_QUOTED]]
    return first, script


def quoted(decoder: Decoder, logits: torch.Tensor, cache: PromptCache, script: Sequence[int]) -> torch.Tensor:
    """Log-probabilities, float64 `[1 + len(script), vocabulary]`: behind a prompt, whose last token's logits are given,
    and behind each token of the script. The cache needs room for it."""
    rows = [logits[None], *([decoder.extend(script, cache)] if script else [])]
    return torch.cat(rows).double().log_softmax(-1)


def nats_a_token(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL divergence from the reference, as the mean over tokens; infinite where a number is not finite."""
    loss = float(F.kl_div(other, reference, reduction="none", log_target=True).sum(-1).mean())
    return loss if loss == loss else float("inf")
