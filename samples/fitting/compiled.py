"""Stores whose chunks a fitted writer has compiled: `kvtool ingest` with its adapters in the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fitting.kinds import WRITTEN, Adapters
from kvtool.__main__ import run
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, prefill_chunks
from kvtool.core.records import making, sensitivity


def ingest(kept: Path, arguments: list[str]) -> None:
    """Run `kvtool ingest` with what `fitted.py writer --out` has kept. The store takes its chunks for the model's own:
    it serves to measure, and nothing else."""
    parameters: list[torch.Tensor] = torch.load(kept, weights_only=True)
    attached: list[Adapters] = []

    def compiled(decoder: Decoder, lead_in: LeadIn, *rest: Any, **more: Any) -> list[ChunkKV]:
        if not attached:
            attached.append(Adapters(decoder, len(parameters[0]), WRITTEN))
            for own, value in zip(attached[0].parameters, parameters, strict=True):
                own.data = value
        with attached[0].active(len(lead_in) > 0):  # the prompt's beginning stays what it is
            return prefill_chunks(decoder, lead_in, *rest, **more)

    making.prefill_chunks = sensitivity.prefill_chunks = compiled  # type: ignore[attr-defined]
    sys.argv = ["kvtool", "ingest", *arguments]
    run()
