"""Every level, and what others do, on the same questions: bits beside loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.levels import LEVELS, level_of, lossy
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids
from kvtool.core.compress.loss import (
    EXACT,
    HeavyRows,
    LevelScheme,
    Question,
    Scheme,
    Toll,
    mean_loss,
    measure_one,
    tolls_of,
)
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.evaluate.measures import Row
from kvtool.core.fusion.plan import Segment
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.session.session import Session
from kvtool.lab.measure.evaluation import RowsOf, by_run, evaluation_facts

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Integers:
    """Plain quantisation, the usual alternative: whole numbers of `bits`, one 16-bit scale a token and head."""

    bits: int

    def rows(self, segment: Segment) -> None:
        """All rows come back."""

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        """Round all layers of one chunk; returns what comes back, and each layer's bytes."""
        return [(self._rounded(keys), self._rounded(values)) for keys, values in kvs], [self._size(kv) for kv in kvs]

    def _size(self, kv: LayerKV) -> int:
        return sum(side.numel() * self.bits // 8 + side.shape[0] * side.shape[1] * _SCALE_BYTES for side in kv)

    def _rounded(self, side: torch.Tensor) -> torch.Tensor:
        wide = side.float()
        scale = (wide.abs().amax(-1, keepdim=True) / (2 ** (self.bits - 1) - 1)).clamp_min(1e-12)
        rounded: torch.Tensor = ((wide / scale).round() * scale).to(side.dtype)
        return rounded


def schemes(profile: Profile | None, heavy: HeavyRows) -> dict[str, Scheme]:
    """List what can be measured: 8 and 4 bits, and the lossy levels, those of a profile only where there is one."""
    names = [level for level in lossy() if profile is not None or not level_of(level).profiled]
    return {"int8": Integers(8), "int4": Integers(4)} | {name: LevelScheme(name, profile, heavy) for name in names}


def chosen_schemes(names: Sequence[str], profile: Profile | None, heavy: HeavyRows) -> dict[str, Scheme]:
    """Pick the named schemes; without names all that store every row.

    Raises
    ------
    UsageError : there is no such scheme.
    """
    known = schemes(profile, heavy)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no scheme {', '.join(unknown)}", f"known: {', '.join(known)}{_of_profile(unknown)}")
    return {name: known[name] for name in names or known if names or level_of(name).share == 100}


def _of_profile(unknown: Sequence[str]) -> str:
    """Return a hint if levels were asked for that need a profile, and the store has none."""
    some = [name for name in unknown if name in LEVELS]
    return f"; {', '.join(some)} with a profile, which `kvtool compress` makes" if some else ""


def codec_rows(session: Session, schemes: Mapping[str, Scheme], options: QueryOptions) -> RowsOf:
    """Make what measures the loss of some schemes on a question; see `measure_one`.

    It raises KvtoolError where a chunk that the question needs is not stored exactly.
    """
    _ = session.decoder  # whose context a prompt has to fit

    def rows_of(request: Request, names: Sequence[str]) -> Mapping[str, Row]:
        plan = lay_out(session, request, options, exactly=True).plan
        for segment in plan.segments[:-1]:
            if segment.ids and not level_of(segment.source.level or "").lossless:
                raise KvtoolError(
                    f"chunk {segment.source.chunk_id.hex()[:12]} is not stored exactly",
                    "ingest its document into a new store",
                )
        question = Question(plan, request.answers)
        return measure_one(session, question, {name: schemes[name] for name in names})

    return rows_of


def codec_facts(
    session: Session, requests: Sequence[Request], options: QueryOptions, profile: Profile | None
) -> dict[str, Any]:
    """Tell what results depend on besides the schemes."""
    facts = evaluation_facts(session.store, session.identity, requests, options)
    return facts | {"profile": None if profile is None else profile.digest.hex()}


def codec_overview(rows: Mapping[int, Mapping[str, Row]], names: Sequence[str]) -> dict[str, Any]:
    """Make the JSON of `inspect codec`.

    Returns
    -------
    `questions`, `exact` (F1 where answers are known) and `schemes[{scheme, bits_per_element, ratio_vs_16bit, kl_first,
    kl_answer, top1_agrees, f1, layers}]`, `layers[{layer, bits_per_element, k_relative_error,
    v_relative_error}]`: the norm of the error over that of the exact keys and values. Bits count records with headers,
    digests, states and side information; a profile is stored once.
    """
    losses = {name: [question[name] for question in questions] for name, questions in by_run(rows).items()}
    exact = mean_loss(losses.pop(EXACT))
    schemes = [_scheme(name, losses[name]) for name in dict.fromkeys((*names, *losses))]
    return {"questions": len(rows), EXACT: exact, "schemes": schemes}


def _scheme(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    tolls = tolls_of(rows)
    bits = sum(tolls, Toll()).bits
    layers = [{"layer": layer} | toll.to_json() for layer, toll in enumerate(tolls)]
    ratio = 16 / bits if bits else None
    return {"scheme": name, "bits_per_element": bits, "ratio_vs_16bit": ratio, **mean_loss(rows), "layers": layers}
