"""A pass over a decoder in few operations a layer, for devices on which each costs its launch.

A model's own forward takes 60 to 70 operations a layer. On a GPU one takes 5 to 20 µs to be asked for, more than the
work of a question's 32 rows. Here a layer is its products and a handful of others: root mean square norms are one,
and norms of heads, rotation and the writing into the prompt cache are one together (`triton_heads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import Placing, Rows
from kvtool.core.model.lean.heads import Heads
from kvtool.core.model.lean.reading import Layer, layer_of, norm_of
from kvtool.core.model.trial import TOLERANCE, UnsupportedArchitecture, check_trial

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache

_TRIAL = 8  # tokens


class LeanPass:
    """Computes rows of a prompt over its cache, as `Decoder.compute` and `walk` do.

    Raises
    ------
    UnsupportedArchitecture : the model computes something that is not known here.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        spec = decoder.spec
        spec.check_halves()
        if not decoder.rotary.is_single:
            raise UnsupportedArchitecture("layers rotate by RoPEs of their own")
        self._windows = [layer.kind.window for layer in spec.layers]
        self._layers = [layer_of(layer) for layer in spec.layers]
        self._norm = norm_of(spec.norm)
        self._heads = Heads(decoder, spec, [layer.head_norms for layer in self._layers])
        self._embedding, self._scaling = spec.embedding, spec.logits

    @torch.inference_mode()
    def compute(
        self,
        ids: torch.Tensor,
        rows: Placing,
        cache: PromptCache,
        keep: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the last `keep` rows, float32 `[keep, vocabulary]`.

        Parameters
        ----------
        ids : int64 `[rows]` on the device.
        position_ids : see `Decoder.compute`.
        """
        hidden = self._walked(ids, rows, cache, keep, position_ids)
        logits: torch.Tensor = self._decoder.model.get_output_embeddings()(self._norm(hidden))
        return logits.float() if self._scaling == 1 else logits.float() * self._scaling

    @torch.inference_mode()
    def walk(self, ids: torch.Tensor, rows: Rows, cache: PromptCache, position_ids: torch.Tensor | None = None) -> None:
        """Do the same without the LM head."""
        self._walked(ids, rows, cache, len(ids), position_ids)

    def _walked(
        self, ids: torch.Tensor, rows: Placing, cache: PromptCache, keep: int, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """What the last layer gives for the last `keep` rows, `[keep, hidden]`."""
        hidden: torch.Tensor = self._decoder.base.embed_tokens(ids)
        if self._embedding != 1:
            hidden = hidden * self._embedding
        table = self._decoder.rotary.table(rows.positions if position_ids is None else position_ids)
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            queries, keys, values = layer.heads(hidden)
            if cache.before_update is not None:
                cache.before_update(number, len(ids))
            queries = self._heads.place(number, queries, keys, values, table, rows.positions, cache.buffers[number])
            if cache.after_update is not None:
                cache.after_update(number)
            if number == last and keep < len(ids):  # no row behind asks for what the others become
                queries, hidden, rows = queries[:, :, -keep:], hidden[-keep:], rows.last(keep)
            hidden = self._attended(number, layer, queries, hidden, rows, cache)
        return hidden

    def _attended(
        self, number: int, layer: Layer, queries: torch.Tensor, hidden: torch.Tensor, rows: Placing, cache: PromptCache
    ) -> torch.Tensor:
        scoring = AttentionParams(layer.scale, self._windows[number])
        mixed = rows.attend(number, queries, *cache.buffers[number].view(), scoring)
        mixed = mixed.transpose(1, 2).reshape(len(hidden), -1)
        return layer.behind(mixed, hidden)


def lean_pass(decoder: Decoder) -> LeanPass:
    """Make the lean pass of a decoder on a GPU, and compare a short prefill with that by the model's own forward.

    Raises
    ------
    UnsupportedArchitecture : its model computes something else.
    """
    if decoder.dtype not in TOLERANCE:
        raise UnsupportedArchitecture(f"{decoder.dtype} on {decoder.device}")
    try:
        made = LeanPass(decoder)
        _try(made, decoder)
    except (AttributeError, TypeError, ValueError) as error:  # a module that is not what it seems
        raise UnsupportedArchitecture(str(error)) from error
    return made


def _try(made: LeanPass, decoder: Decoder) -> None:
    vocabulary = int(decoder.config.vocab_size)
    ids = [number * (vocabulary // _TRIAL) for number in range(_TRIAL)]
    exact, _ = decoder.prefill(ids)
    cache = decoder.new_cache(_TRIAL)
    cache.set_length(_TRIAL)
    rows = Rows.of(torch.arange(_TRIAL), decoder.device)
    found = made.compute(torch.tensor(ids).to(decoder.device), rows, cache)[-1]
    check_trial(found, exact, decoder.dtype, len(decoder.layers))
