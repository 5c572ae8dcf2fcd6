"""Records that vLLM has computed (`kvtool ingest --engine`), compared with kvtool's own of the same documents.

    python samples/benchmarks/vllm_ingest.py OWN_STORE VLLM_STORE MODEL [QUESTIONS]

Both stores have the same model, lead-in and documents. QUESTIONS has one a line; each is answered from both stores by
every mode, greedily, in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW
from kvtool.core.records.read import read_chunk

MODES = ("reuse", "epic", "blend", "union")
_RANKED = 0.15  # of a chunk's rows, as `union` recomputes by default


def differences(own: Store, far: Store) -> dict[str, tuple[float, float, float]]:
    """Return of keys and values: the largest difference, its RMS, and that over the RMS of the numbers themselves."""
    sums: dict[str, list[float]] = {"keys": [0.0, 0.0, 0.0, 0.0], "values": [0.0, 0.0, 0.0, 0.0]}
    for chunk_id in own.chunk_ids():
        info = own.chunk_info(chunk_id)
        assert info is not None
        one, other = (read_chunk(store, chunk_id, RAW, info.layers) for store in (own, far))
        for side, total in sums.items():
            for a, b in zip(getattr(one, side), getattr(other, side), strict=True):
                apart = a.double() - b.double()
                total[0] = max(total[0], float(apart.abs().max()))
                total[1] += float(apart.square().sum())
                total[2] += float(a.double().square().sum())
                total[3] += a.numel()
    return {side: (worst, (of / count) ** 0.5, (of / own) ** 0.5) for side, (worst, of, own, count) in sums.items()}


def ranking(own: Store, far: Store) -> tuple[float, float]:
    """Return the RMS difference of sensitivities over their RMS, and the share of common rows among the largest."""
    apart, same, count, known = 0.0, 0, 0, 0.0
    for chunk_id in own.chunk_ids():
        infos = [store.chunk_info(chunk_id) for store in (own, far)]
        one, other = (np.frombuffer(info.sensitivity if info else b"", "<f2").astype(float) for info in infos)
        top = round(_RANKED * len(one))
        same += len({*np.argsort(-one)[:top]} & {*np.argsort(-other)[:top]})
        count, apart, known = count + top, apart + float(np.square(one - other).sum()), known + float((one**2).sum())
    return (apart / known) ** 0.5, same / count


def answers(path: str, model: str, questions: list[str]) -> list[tuple[str, ...]]:
    """Return the answers to each question, mode by mode."""
    with kvtool.open(path, model=model, dtype="float32") as cache:
        wanted: dict[str, Any] = {"max_tokens": 24, "top_k": 3}
        return [tuple(cache.query(one, fusion=mode, **wanted).answer for mode in MODES) for one in questions]


def main(own: str, far: str, model: str, questions: str = "") -> None:
    torch.set_num_threads(1)
    with Store.open(Path(own)) as one, Store.open(Path(far)) as other:
        assert {*one.chunk_ids()} == {*other.chunk_ids()}
        for side, (worst, rms, relative) in differences(one, other).items():
            print(f"{side}: largest {worst:.2g}, RMS {rms:.2g}, {relative:.2g} of the numbers' RMS")
        print(
            "sensitivities: {:.2g} of their RMS apart, {:.1%} of the rows that union recomputes".format(
                *ranking(one, other)
            )
        )
    asked = Path(questions).read_text("utf-8").split("\n") if questions else []
    asked = [one for one in asked if one]
    pairs = zip(asked, answers(own, model, asked), answers(far, model, asked), strict=True)
    for question, here, there in pairs:
        alike = " ".join(
            f"{mode}:{'same' if a == b else 'OTHER'}" for mode, a, b in zip(MODES, here, there, strict=True)
        )
        print(f"{alike}  {question}")


if __name__ == "__main__":
    main(*sys.argv[1:])
