"""What a prompt costs to compute, counted: floating point operations by rows, keys and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.core.fusion.engine import Fused
    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Numbers in the matrices of one decoder layer.

    Attributes
    ----------
    used : those that one row is multiplied with; fewer than `held` in a mixture of experts.
    """

    used: int
    held: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """What FLOPs follow from.

    Attributes
    ----------
    head_channels : query heads * head_dim; where a key is wider than a value, or layers differ, their mean.
    lm_head : numbers in the LM head.
    windows : how many keys a row of each layer sees at most; None: all before it.
    """

    layers: tuple[LayerWeights, ...]
    head_channels: int
    lm_head: int
    windows: Windows = ()

    @classmethod
    def of(cls, decoder: Decoder) -> Architecture:
        """Read off a model's own modules. Matrices are linear layers, stacks of matrices are experts."""
        share = _expert_share(decoder.config)
        widths = [shape.attended + shape.value_dim for shape in decoder.shapes]
        return cls(
            layers=tuple(_weights(layer, share) for layer in decoder.layers),
            head_channels=decoder.config.num_attention_heads * sum(widths) // (2 * len(decoder.shapes)),
            lm_head=decoder.model.get_output_embeddings().weight.numel(),
            windows=decoder.windows,
        )


_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _expert_share(config: Any) -> float:
    chosen = next(filter(None, (getattr(config, name, None) for name in _CHOSEN)), None)
    experts = next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), None)
    return chosen / experts if chosen and experts else 1.0


def _weights(layer: Any, share: float) -> LayerWeights:
    matrices = [weight for weight in layer.parameters() if weight.ndim >= 2]
    dense = sum(weight.numel() for weight in matrices if weight.ndim == 2)
    experts = sum(weight.numel() for weight in matrices if weight.ndim > 2)
    return LayerWeights(dense + round(experts * share), dense + experts)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Rows that a layer computes in one pass, and the keys that these rows see, added up."""

    rows: int
    keys: int


Windows = tuple[
    int | None, ...
]  # of layers that keep something; of those behind one row is computed, which is left out
Work = tuple[LayerWork, ...]  # by layer, the first ones; layers behind are not computed


def keys_seen(positions: Sequence[int], window: int | None = None) -> int:
    """Keys that the rows at these prompt positions see, causally and through a window."""
    if window is None:
        return sum(positions) + len(positions)
    return sum(min(position + 1, window) for position in positions)


def full_work(length: int, windows: Windows) -> Work:
    """Plain prefill of a prompt."""
    return tuple(LayerWork(length, keys_seen(range(length), window)) for window in windows)


def fused_work(fused: Fused, selector: Selector, windows: Windows) -> list[Work]:
    """The passes of a fused prompt: the question's own where the mode asks for one, and the main one.

    Rows are those counted by the engine, layer by layer. Where a mode drops rows from one layer to the next, those of
    the layers between the first and the last choice are taken to see as many keys as the reusable rows on average.
    """
    asked = selector.asked(fused.plan, len(fused.tokens.rows))
    fresh = _positions(~fused.plan.mask("hit", "exact"))
    layers = zip(fused.tokens.rows, windows, strict=True)
    main = tuple(_layer_work(rows, fresh, fused, window) for rows, window in layers)
    if not asked or not selector.uses_cache:
        return [main]
    # It ends with the last layer's queries and keys, which are left out here; a hole is computed to the end.
    whole = len(fused.tokens.rows) if bool(fused.plan.mask("miss").any()) else asked.stop - 1
    return [tuple(LayerWork(len(fresh), keys_seen(fresh, window)) for window in windows[:whole]), main]


def _layer_work(rows: int, fresh: list[int], fused: Fused, window: int | None) -> LayerWork:
    again = rows - len(fresh)
    last = _positions(fused.recomputed)
    among = last if again == len(last) else _reusable(fused.plan)
    share = again / len(among) if among else 0.0
    return LayerWork(rows, keys_seen(fresh, window) + round(share * keys_seen(among, window)))


def _reusable(plan: Plan) -> list[int]:
    """Positions of cached rows that are not what full prefill gives."""
    return _positions(plan.mask("hit"))


def _positions(mask: Any) -> list[int]:
    found: list[int] = mask.nonzero()[:, 0].tolist()
    return found


def layer_flops(model: Architecture, layer: int, work: LayerWork) -> int:
    """Count the FLOPs of one layer: linear layers, Q @ Kᵀ and P @ V; two for a multiplication with its addition."""
    return 2 * model.layers[layer].used * work.rows + 4 * model.head_channels * work.keys


def flops(model: Architecture, passes: Sequence[Work]) -> int:
    """Count the FLOPs of all passes of a prompt, and of one row of the LM head."""
    linear = sum(layer_flops(model, layer, work) for one in passes for layer, work in enumerate(one))
    return linear + 2 * model.lm_head
