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
from kvtool.core.model.lean.reading import Layer, read_layer, read_norm
from kvtool.core.model.stepping.family import check_unshaped
from kvtool.core.model.stepping.kept import Unfit

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache

# How far the logits of the trial may be from the model's own: root mean square difference, by that of the logits.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
_TRIAL = 8  # tokens


class LeanPass:
    """Computes rows of a prompt over its cache, as `Decoder.compute` and `walk` do.

    Raises
    ------
    Unfit : the model computes something that is not known here; or its own forward gives other logits.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        check_unshaped(decoder)
        if not decoder.rotary.is_single:
            raise Unfit("layers rotate by RoPEs of their own")
        self._windows = [kind.window for kind in decoder.kinds]
        self._layers = [read_layer(decoder, layer) for layer in decoder.layers]
        self._norm = read_norm(decoder.base.norm)
        self._heads = Heads(decoder, [layer.head_norms for layer in self._layers])
        self._embedding = float(getattr(decoder.base, "embedding_multiplier", 1.0))
        self._scaling = 1.0 / float(getattr(decoder.config, "logits_scaling", 1.0))

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


def lean_pass(decoder: Decoder) -> LeanPass | None:
    """Make the lean pass of a decoder on a GPU; None: its model computes something else, or it is on a CPU."""
    if not decoder.device.startswith("cuda") or decoder.dtype not in _ROUNDING:
        return None
    try:
        made = LeanPass(decoder)
        _try(made, decoder)
    except (Unfit, AttributeError, TypeError, ValueError):  # a module that is not what it seems
        return None
    return made


def _try(made: LeanPass, decoder: Decoder) -> None:
    """Compare a short prefill with that by the model's own forward."""
    vocabulary = int(decoder.config.vocab_size)
    ids = [number * (vocabulary // _TRIAL) for number in range(_TRIAL)]
    exact, _ = decoder.prefill(ids)
    cache = decoder.new_cache(_TRIAL)
    cache.set_length(_TRIAL)
    rows = Rows.of(torch.arange(_TRIAL), decoder.device)
    found = made.compute(torch.tensor(ids).to(decoder.device), rows, cache)[-1]
    off = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    if not float(off) <= _ROUNDING[decoder.dtype]:
        raise Unfit(f"its own forward gives other logits: off by {float(off):.3g}")
