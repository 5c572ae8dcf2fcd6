"""Attention of `transformers`' modules, computed by the rows of the running pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.attention import AttentionRows, QueryRows
from kvtool.core.model.hf.mla import latents_of
from kvtool.core.model.hf.modules import ForwardEnded
from kvtool.core.model.passes import Pass

IMPLEMENTATION = "kvtool_rows"
_running: ContextVar[Pass | None] = ContextVar("running_pass", default=None)


@contextmanager
def running(job: Pass) -> Iterator[None]:
    """Set the pass that a model computes inside: its layers do not hand it on to their attention."""
    token = _running.set(job)
    try:
        yield
    finally:
        _running.reset(token)


def is_running(job: Pass) -> bool:
    return _running.get() is job


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: AttentionRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for `transformers`' attention interface, `[batch, rows, heads, head_dim]`. Without `rows`,
    those of the running pass decide what is seen; without any, it is a causal prefill. `kwargs` has `sliding_window`,
    `softcap` and `s_aux` (sinks), where a layer has them."""
    if kwargs.get("position_bias") is not None:
        needed = "that would need the bias made for chosen rows"
        raise ModelError(f"attention adds a position_bias; {needed}", "use a model with plain rotary attention")
    latents = latents_of(module)
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    job = _running.get() if rows is None else None
    rows = rows if job is None else job.rows
    if (
        latents is not None
        and isinstance(rows, QueryRows)
        and latents.should_expand(len(rows), key.shape[2], rows.pairs)
    ):
        (key, value), latents = latents.heads_of(key), None
    if latents is not None:
        query = latents.absorbed(query)
    if job is not None and job.on_layer.attend(module.layer_idx, query, key, value, params):
        raise ForwardEnded
    if rows is not None:
        out = rows.attend(module.layer_idx, query, key, value, params)
    elif key.shape[2] == query.shape[2]:
        out = attend(query, key, value, params, KeyRanges.run(range(key.shape[2]), params.window, query.device))
    else:
        raise ModelError("rows over a longer cache need their positions", "this is a bug in kvtool")
    if latents is not None:
        out = latents.unfolded(out)
    return out.transpose(1, 2).contiguous(), None
