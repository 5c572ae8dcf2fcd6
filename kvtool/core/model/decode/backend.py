"""Decode backend: the protocol of a decoding step, and the step by the model's own forward."""

from __future__ import annotations

from typing import Protocol

import torch

from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


class DecodeBackend(Protocol):
    """Appends tokens to one prompt cache.

    Between two steps the cache is whole: it holds the rows of all tokens that were given. Other code that reads or
    extends it may go on from there.

    Attributes
    ----------
    name : how steps are computed: "native", "cuda graph", "torch".
    why : the reason, where it is not the fastest backend that there is.
    """

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def step(self, token: int) -> torch.Tensor:
        """Append one token to the cache; return the logits after it, float32 `[vocabulary]`, on the model's device.

        They are the caller's until the next step, which may overwrite them.
        """


class TorchBackend:
    """Steps by the model's own forward, hooks and all: any family, any device; `why` another backend does not serve.

    Other backends are measured against it.
    """

    name = "torch"

    def __init__(self, decoder: Decoder, cache: PromptCache, why: str = "") -> None:
        self._decoder = decoder
        self._cache = cache
        self.why = why

    def step(self, token: int) -> torch.Tensor:
        """Append one token; return float32 `[vocabulary]`."""
        return self._decoder.extend([token], self._cache)[-1]
