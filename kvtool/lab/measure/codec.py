"""Every level, and what others do, on the same questions: bits beside loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.levels import level_of, lossy
from kvtool.core.codec.profile import Profile
from kvtool.core.compress.loss import EXACT, LevelScheme, Question, Scheme, measure
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.source import StoreSource
from kvtool.core.query.layout import lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.session.session import Session

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Integers:
    """Plain quantisation, the usual alternative: whole numbers of `bits`, one 16-bit scale a token and head."""

    bits: int

    def round_trip(self, kv: LayerKV, layer: int) -> tuple[LayerKV, int]:
        """One layer of one chunk as it comes back, and its bytes."""
        keys, values = kv
        size = sum(side.numel() * self.bits // 8 + side.shape[0] * side.shape[1] * _SCALE_BYTES for side in kv)
        return (self._rounded(keys), self._rounded(values)), size

    def _rounded(self, side: torch.Tensor) -> torch.Tensor:
        wide = side.float()
        scale = (wide.abs().amax(-1, keepdim=True) / (2 ** (self.bits - 1) - 1)).clamp_min(1e-12)
        rounded: torch.Tensor = ((wide / scale).round() * scale).to(side.dtype)
        return rounded


def schemes(profile: Profile | None, layers: int) -> dict[str, Scheme]:
    """All schemes by name: the profile's levels, the plain predictors' (`anchor` is the paper's), 8 and 4 bits."""
    found: dict[str, Scheme] = {"int8": Integers(8), "int4": Integers(4)}
    for predictor in ("anchor", "mean"):
        found |= {f"{predictor}-{level}": LevelScheme(level, None, predictor, layers) for level in lossy()}
    if profile is not None:
        found |= {level: LevelScheme(level, profile, "auto", layers) for level in lossy()}
    return found


def chosen_schemes(names: Sequence[str], profile: Profile | None, layers: int) -> dict[str, Scheme]:
    """The named ones, or all.

    Raises
    ------
    UsageError : there is no such scheme.
    """
    known = schemes(profile, layers)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no scheme {', '.join(unknown)}", f"known: {', '.join(known)}")
    return {name: known[name] for name in (names or known)}


def codec_report(
    session: Session,
    requests: Sequence[Request],
    options: QueryOptions,
    wanted: dict[str, Scheme],
    advance: Callable[[int], None] = lambda questions: None,
) -> dict[str, Any]:
    """Bits, loss and answers of schemes over questions, each answered from exact records and from lossy ones.

    Returns
    -------
    `questions`, `exact` (F1 where answers are known) and `schemes[{scheme, bits_per_element, ratio_vs_16bit, kl_first,
    kl_answer, top1_agrees, f1, layers}]`, `layers[{layer, bits_per_element, k_relative_error,
    v_relative_error}]`: the norm of the error over that of the exact keys and values. Bits count records with headers,
    digests, states and side information; a profile is stored once.

    Raises
    ------
    KvtoolError : a chunk that a question needs is not stored exactly.
    """
    decoder = session.decoder
    exact = StoreSource.of(session.store, decoder)
    losses = measure(decoder, exact, _prompts(session, requests, options), wanted, session.identity.prefix_id, advance)
    rows = []
    for name in wanted:
        loss = losses[name]
        ratio = 16 / loss.bits if loss.bits else None
        row = {"scheme": name, "bits_per_element": loss.bits, "ratio_vs_16bit": ratio, **loss.to_json()}
        rows.append(row | {"layers": [{"layer": at} | toll.to_json() for at, toll in enumerate(loss.layers)]})
    return {"questions": len(requests), EXACT: losses[EXACT].to_json(), "schemes": rows}


def _prompts(session: Session, requests: Sequence[Request], options: QueryOptions) -> Iterator[Question]:
    for request in requests:
        plan = lay_out(session, request, options, exactly=True).plan
        inexact = [s for s in plan.segments[:-1] if s.ids and not level_of(s.source.level or "").lossless]
        if inexact:
            raise KvtoolError(
                f"chunk {inexact[0].source.chunk_id.hex()[:12]} is not stored exactly",
                "ingest its document into a new store",
            )
        yield Question(plan, request.answers)
