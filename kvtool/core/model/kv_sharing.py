"""KV-sharing layers at the end of a model: only the rows whose logits are needed are computed.

Such layers attend to what earlier layers keep (Gemma 3n, Gemma 4), so no later row reads what their other rows become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvtool.core.model.preemption import for_this_pass

Some = slice | torch.Tensor


@contextmanager
def prune_rows(layers: Sequence[torch.nn.Module], keep: int) -> Iterator[None]:
    """Let these layers, which follow each other to a model's end, compute the last `keep` rows."""
    cut = for_this_pass(_cut(slice(-keep, None), keep))
    handles = [layer.register_forward_pre_hook(cut, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(some: slice, keep: int) -> Any:
    def cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        changed = {
            "position_embeddings": tables_of_rows(kwargs["position_embeddings"], some),
            "rows": kwargs["rows"].last(keep),
        }
        if kwargs.get("position_ids") is not None:
            changed["position_ids"] = kwargs["position_ids"][:, some]
        return of_rows(args, some), kwargs | changed

    return cut


def of_rows(args: tuple[Any, ...], some: Some) -> tuple[Any, ...]:
    """Take some of the rows of a layer's arguments: hidden states, and an input of its own (Gemma 4)."""
    return tuple(one[:, some] if isinstance(one, torch.Tensor) else one for one in args)


def tables_of_rows(tables: Any, some: Some) -> Any:
    """Take some of the rows that layers rotate by: cos and sin, or complex numbers."""
    return tables[:, some] if isinstance(tables, torch.Tensor) else tuple(side[:, some] for side in tables)
