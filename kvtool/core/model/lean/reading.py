"""A decoder layer on a GPU as few functions of tensors, by its spec.

A norm that is no plain root mean square norm, and an MLP of experts, are called as the modules they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvtool.core.kernels.heads_triton import HeadNorm
from kvtool.core.model.spec import LayerSpec, NormSpec, Projection
from kvtool.core.model.trial import UnsupportedArchitecture

Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes
    ----------
    project : rows `[rows, hidden]`, normed, to queries, keys and values `[rows, heads · head_dim]` each.
    flat_norms : of all heads' queries and keys together (OLMo 2).
    head_norms : of each head's (Qwen3).
    before, after : norms in front of attention and MLP, and behind them.
    residual : what the outputs of attention and MLP are multiplied by.
    """

    project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    out: Map
    mlp: Map
    before: tuple[Map | None, Map | None]
    after: tuple[Map | None, Map | None]
    flat_norms: tuple[Map, Map] | None
    head_norms: tuple[HeadNorm, HeadNorm] | None
    scale: float
    residual: float

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[rows, heads · head_dim]` each, before norms of heads and rotation."""
        queries, keys, values = self.project(_by(self.before[0], hidden))
        if self.flat_norms is not None:
            queries, keys = self.flat_norms[0](queries), self.flat_norms[1](keys)
        return queries, keys, values

    def behind(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """From what attention gives, `[rows, heads · head_dim]`, to the next layer's `[rows, hidden]`."""
        hidden = torch.add(hidden, _by(self.after[0], self.out(mixed)), alpha=self.residual)
        output = _by(self.after[1], self.mlp(_by(self.before[1], hidden)))
        return torch.add(hidden, output, alpha=self.residual)


def _by(norm: Map | None, rows: torch.Tensor) -> torch.Tensor:
    return rows if norm is None else norm(rows)


def layer_of(spec: LayerSpec[Projection]) -> Layer:
    """Make a layer's functions.

    Raises
    ------
    UnsupportedArchitecture : it has parts that were never tried on a GPU.
    """
    if any(spec.before) and any(spec.after):
        raise UnsupportedArchitecture("norms before and behind attention, which was not tried on a GPU")
    flat, by_head = _head_norms(spec)
    return Layer(
        project=_projection((spec.query, spec.key, spec.value)),
        out=_linear(spec.out.module),
        mlp=_mlp(spec),
        before=(_maybe(spec.before[0]), _maybe(spec.before[1])),
        after=(_maybe(spec.after[0]), _maybe(spec.after[1])),
        flat_norms=flat,
        head_norms=by_head,
        scale=spec.scale,
        residual=spec.residual,
    )


def norm_of(norm: NormSpec) -> Map:
    """Return a norm as one operation where it multiplies by its weight as it is kept; else the module itself."""
    if not norm.is_rms or norm.adds_one:
        by_module: Map = norm.module
        return by_module
    weight, epsilon = norm.module.weight.detach(), norm.epsilon
    return lambda rows: F.rms_norm(rows, weight.shape, weight, epsilon)


def _maybe(norm: NormSpec | None) -> Map | None:
    return None if norm is None else norm_of(norm)


def _head_norms(spec: LayerSpec[Projection]) -> tuple[tuple[Map, Map] | None, tuple[HeadNorm, HeadNorm] | None]:
    """Norms of queries and keys: over all heads together, or head by head."""
    if spec.head_norms is None:
        return None, None
    query, key = spec.head_norms
    if query.adds_one or key.adds_one:
        raise UnsupportedArchitecture(f"{type(query.module).__name__} adds one to its weight")
    if not spec.normed_by_head:
        return (norm_of(query), norm_of(key)), None
    return None, (
        HeadNorm(query.module.weight.detach(), query.epsilon),
        HeadNorm(key.module.weight.detach(), key.epsilon),
    )


def _projection(
    parts: tuple[Projection, Projection, Projection],
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    query, key, value = (_linear(part.module) for part in parts)
    if parts[0].module is parts[2].module:
        sizes = [part.rows for part in parts]

        def cut(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            queries, keys, values = query(rows).split(sizes, -1)
            return queries, keys, values

        return cut
    return lambda rows: (query(rows), key(rows), value(rows))


def _linear(module: Any) -> Map:
    if type(module) is not torch.nn.Linear:
        raise UnsupportedArchitecture(f"{type(module).__name__} is no plain linear layer")
    across = module.weight.detach().t()  # turned once: at each call it would cost a fifth of what a product does
    if module.bias is None:
        return lambda rows: torch.mm(rows, across)
    bias = module.bias.detach()
    return lambda rows: torch.addmm(bias, rows, across)


def _mlp(spec: LayerSpec[Projection]) -> Map:
    """A gated MLP as its products; what is none (experts) as the module itself, which wants `[1, rows, hidden]`."""
    mlp = spec.mlp
    if mlp is None:
        return partial(_by_module, spec.module.mlp)
    activation, gate, up, down = mlp.function, *(_linear(one.module) for one in (mlp.gate, mlp.up, mlp.down))
    if mlp.gate.module is mlp.up.module:

        def cut(rows: torch.Tensor) -> torch.Tensor:
            gated, raised = gate(rows).chunk(2, -1)
            return down(activation(gated).mul_(raised))

        return cut
    return lambda rows: down(activation(gate(rows)).mul_(up(rows)))


def _by_module(module: Any, rows: torch.Tensor) -> torch.Tensor:
    given = module(rows[None])
    out: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return out.view(rows.shape)
