"""Stores whose chunks a fitted writer has compiled or an offset has moved: `kvtool ingest` with it in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fitting.kinds import WRITTEN, Adapters
from kvtool.__main__ import run
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, prefill_chunks
from kvtool.core.records import encode

Prefill = Callable[..., list[ChunkKV]]


def ingest(kept: Path, arguments: list[str]) -> None:
    """Run `kvtool ingest` with what `fitted.py writer --out` or `fitted.py offset --out` has kept. The store takes its
    chunks for the model's own: it serves to measure, and nothing else."""
    parameters: list[torch.Tensor] = torch.load(kept, weights_only=True)
    own = _moved(*parameters) if len(parameters) == 2 else _written(parameters)
    encode.prefill_chunks = own  # type: ignore[attr-defined]
    sys.argv = ["kvtool", "ingest", *arguments]
    run()


def _written(parameters: list[torch.Tensor]) -> Prefill:
    attached: list[Adapters] = []

    def compiled(decoder: Decoder, lead_in: LeadIn, *rest: Any, **more: Any) -> list[ChunkKV]:
        if not attached:
            attached.append(Adapters(decoder, len(parameters[0]), WRITTEN))
            for own, value in zip(attached[0].parameters, parameters, strict=True):
                own.data = value
        with attached[0].active(len(lead_in) > 0):  # the prompt's beginning stays what it is
            return prefill_chunks(decoder, lead_in, *rest, **more)

    return compiled


def _moved(*offsets: torch.Tensor) -> Prefill:
    def compiled(decoder: Decoder, lead_in: LeadIn, *rest: Any, **more: Any) -> list[ChunkKV]:
        made = prefill_chunks(decoder, lead_in, *rest, **more)
        if not len(lead_in):
            return made
        return [
            ChunkKV(*([*map(_sum, side, offset)] for side, offset in zip((kv.keys, kv.values), offsets, strict=True)))
            for kv in made
        ]

    return compiled


def _sum(numbers: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Add to a layer's, in float32."""
    return (numbers.float() + offset).to(numbers.dtype)
