"""Effect of a shift: how much nearer it brings the reused rows to full prefill's, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from kvtool.core.fusion.selectors.union import Union
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.lab.measure.reused import ReusedPrompt


def shift_report(prompt: ReusedPrompt, full: PromptCache, ratio: float = 0.15) -> dict[str, Any]:
    """Compare what `union` leaves of a prompt's reused rows with full prefill's, without a shift and with it.

    Returns
    -------
    `ratio`; `tokens_shifted`: how many; `common`: what the probes of a chunk have in common of their change;
    `layers[{layer, k_before, k_after, v_before, v_after}]`: ‖Δ‖ / ‖full‖ over the shifted rows.
    """
    plain = prompt.fused(Union(ratio=ratio, shift=False)).cache
    fused = prompt.fused(Union(ratio=ratio))
    rows = fused.shifted.rows.nonzero()[:, 0].to(prompt.decoder.device)
    layers = []
    for number, exact in enumerate(full.buffers):
        right = exact.keys[0].index_select(1, rows).float(), exact.values[0].index_select(1, rows).float()
        row: dict[str, Any] = {"layer": number}
        for name, cache in (("before", plain), ("after", fused.cache)):
            buffer = cache.buffers[number]
            for side, found, wanted in zip(("k", "v"), (buffer.keys, buffer.values), right, strict=True):
                row[f"{side}_{name}"] = _relative(found[0].index_select(1, rows).float(), wanted)
        layers.append(row)
    return {"ratio": ratio, "tokens_shifted": len(rows), "common": fused.shifted.common, "layers": layers}


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    size = float(exact.norm())
    return float((found - exact).norm()) / size if size else 0.0
