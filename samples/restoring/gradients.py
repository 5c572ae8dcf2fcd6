"""Which rows, layers and sides a distance comes from: integrated gradients (Sundararajan et al. 2017, section 3).

From a fused cache X straight to full prefill's F the gradients of the answer's KL, times what a number still has to
change, sum to the KL itself: every key and value has its part of it, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.quantized import dequantize_rows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.modules import cache_name
from kvtool.core.model.prompt_cache import PromptCache
from restoring.case import BOTH, Case, sides_of

# Gauss-Legendre on [0, 1]: exact as long as the KL is a polynomial of degree 4 or less along the way.
NODES = ((0.2113248654, 0.5), (0.7886751346, 0.5))
MIDDLE = ((0.5, 1.0),)  # exact where the KL is a square


def shares(case: Case, cache: PromptCache, nodes: Sequence[tuple[float, float]] = NODES) -> torch.Tensor:
    """Each key's and value's part of the mean KL of the answer, float32 `[layers, 2, context]`, in nats."""
    total = torch.zeros(len(case.decoder.layers), 2, case.context)
    for way, weight in nodes:
        total += weight * _towards(case, cache, way)
    return total


def _towards(case: Case, cache: PromptCache, way: float) -> torch.Tensor:
    """Minus the gradient at X + way · (F − X), times F − X."""
    rows = slice(0, case.context)
    starts, changes = [], []
    for layer in range(len(case.decoder.layers)):
        for side in BOTH:
            now = sides_of(cache, layer)[side][:, :, rows].float()
            change = sides_of(case.full, layer)[side][:, :, rows].float() - now
            starts.append((now + way * change).to(case.decoder.dtype).requires_grad_())
            changes.append(change)
    with differentiable(case.decoder), torch.enable_grad():
        gradients = torch.autograd.grad(_loss(case, starts), starts)
    parts = [-(slope.float() * change).sum((0, 1, 3)) for slope, change in zip(gradients, changes, strict=True)]
    return torch.stack(parts).view(len(case.decoder.layers), 2, -1)


def _loss(case: Case, sides: list[torch.Tensor]) -> torch.Tensor:
    kept = DynamicCache()
    for layer in range(len(sides) // 2):
        kept.update(sides[2 * layer], sides[2 * layer + 1], layer)
    ids = torch.tensor([[*case.plan.segments[-1].ids, *case.script[:-1]]])
    positions = torch.arange(case.context, case.context + ids.shape[1])
    out = case.decoder.model(
        input_ids=ids,
        position_ids=positions[None],
        use_cache=True,
        logits_to_keep=len(case.script),
        **{cache_name(case.decoder.base): kept},
    )
    log_q = out.logits[0].float().log_softmax(-1)
    log_p = case.logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


class _Product(torch.autograd.Function):
    """A product with packed weights, which are unpacked again for the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, module: PackedLinear) -> torch.Tensor:
        ctx.module = module
        return module.unpacked_product(rows.detach())

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        module: PackedLinear = ctx.module
        size = module.out_features * module.in_features
        weight = dequantize_rows(module.matrix, 0, module.out_features, torch.empty(size, dtype=slope.dtype))
        return slope @ weight.view(module.out_features, module.in_features), None


@contextmanager
def differentiable(decoder: Decoder) -> Iterator[None]:
    """The model's own forward with gradients, of packed weights, too."""
    packed = [module for module in decoder.model.modules() if isinstance(module, PackedLinear)]
    with decoder.plain_attention():
        for module in packed:
            module.forward = lambda rows, module=module: _Product.apply(rows, module)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in packed:
                del module.forward
