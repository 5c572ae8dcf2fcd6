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
    head_channels : query heads * head_dim.
    lm_head : numbers in the LM head.
    """

    layers: tuple[LayerWeights, ...]
    head_channels: int
    lm_head: int

    @classmethod
    def of(cls, decoder: Decoder) -> Architecture:
        """Read off a model's own modules. Matrices are linear layers, stacks of matrices are experts."""
        share = _expert_share(decoder.config)
        return cls(
            layers=tuple(_weights(layer, share) for layer in decoder.layers),
            head_channels=decoder.config.num_attention_heads * decoder.head_dim,
            lm_head=decoder.model.get_output_embeddings().weight.numel(),
        )


def _expert_share(config: Any) -> float:
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
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


Work = tuple[LayerWork, ...]  # by layer, the first ones; layers behind are not computed


def keys_seen(positions: Sequence[int]) -> int:
    """Keys that the rows at these prompt positions see, causally."""
    return sum(positions) + len(positions)


def full_work(length: int, layers: int) -> Work:
    """Plain prefill of a prompt."""
    return (LayerWork(length, length * (length + 1) // 2),) * layers


def fused_work(fused: Fused, selector: Selector) -> list[Work]:
    """The passes of a fused prompt: the question's own where the mode asks for one, and the main one.

    Rows are those counted by the engine, layer by layer. Where a mode drops rows from one layer to the next, those of
    the layers between the first and the last choice are taken to see as many keys as the reusable rows on average.
    """
    asked = selector.asked(fused.plan, len(fused.tokens.rows))
    fresh = _positions(~fused.plan.mask("hit", "exact"))
    main = tuple(_layer_work(rows, fresh, fused) for rows in fused.tokens.rows)
    if not asked or not selector.uses_cache:
        return [main]
    # It ends with the last layer's queries and keys, which are left out here; a hole is computed to the end.
    whole = len(fused.tokens.rows) if bool(fused.plan.mask("miss").any()) else asked.stop - 1
    return [(LayerWork(len(fresh), keys_seen(fresh)),) * whole, main]


def _layer_work(rows: int, fresh: list[int], fused: Fused) -> LayerWork:
    again = rows - len(fresh)
    last = _positions(fused.recomputed)
    among = last if again == len(last) else _reusable(fused.plan)
    share = again / len(among) if among else 0.0
    return LayerWork(rows, keys_seen(fresh) + round(share * keys_seen(among)))


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
