"""What each rule for choosing the rows of a chunk that stay loses, with nothing else lost.

    kvtool ingest samples/corpus --system @samples/benchmarks/short.txt --store STORE
    python samples/benchmarks/row_rules.py STORE [--batch FILE.jsonl] [--limit N] [--keep .75 .5 .25] [--text]

KL in nats a token of the answer from all rows, nothing recomputed (`reuse`); a store that holds its chunks exactly.
`repeated` is what `compress --keep` goes by (kvtool/core/records/heavy_hitters.py). `--text`: tokens are dropped from
the text before it is prefilled, as LLMLingua (arXiv 2310.05736) does by how much they surprise a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.encode import some_rows
from kvtool.core.common.types import Ids
from kvtool.core.compress.loss import Question, measure_one
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, Plan, Segment, build_plan
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import KVSource, ReadStats
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.prefill import ChunkKV, PrefillItem, prefill_chunks
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.records.heavy_hitters import heaviest, repeated
from kvtool.core.session.session import Session

SAMPLES = Path(__file__).resolve().parents[1]
Worth = Mapping[str, torch.Tensor]  # by rule, float32 [tokens]


class Looked:
    """Sums up what a chunk's rows are looked at by its own later rows, over layers and heads (H2O)."""

    def __init__(self, tokens: int) -> None:
        self.total = torch.zeros(tokens)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        before = key.shape[1] - query.shape[1]
        seen = KeyRanges.run(range(before, key.shape[1]), scoring.window, key.device)
        weights = attention_weights(query, key, seen, scoring)[:, :, before:]
        self.total += weights.tril(-1).sum((0, 1))


def worth_of(session: Session, ids: Ids, sensitivity: bytes) -> Worth:
    """What every rule says of a chunk's rows."""
    decoder, lead_in, tokens = session.decoder, session.lead_in, len(ids)
    looked = Looked(tokens)
    (kv,) = prefill_chunks(decoder, lead_in, [PrefillItem(ids)], watches=[looked])
    (again,) = repeated(decoder, lead_in, [ids])
    depends = torch.frombuffer(bytearray(sensitivity), dtype=torch.float16).float()
    draw = random.Random(str(ids))
    return {
        "repeated": again,
        "repeated × √sensitivity": again * depends.sqrt(),
        "repeated × sensitivity": again * depends,
        "sensitivity": depends,
        "own later rows (H2O)": looked.total,
        "H2O, a mean of the rows that see it": looked.total / torch.arange(tokens - 1, -1, -1).clamp_min(1),
        "H2O × sensitivity": looked.total * depends,
        "size of values": torch.stack([*kv.values]).float().norm(dim=-1).mean((0, 1)),
        "smallness of keys": -torch.stack([*kv.keys]).float().norm(dim=-1).mean((0, 1)),
        "by lot": torch.tensor([draw.random() for _ in ids]),
    }


class Rules:
    """The worth of chunks, each worked out once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[bytes, Worth] = {}

    def of(self, segment: Segment) -> Worth:
        source = segment.source
        if source.chunk_id not in self._known:
            self._known[source.chunk_id] = worth_of(self._session, source.ids, source.sensitivity)
        return self._known[source.chunk_id]


@dataclass(frozen=True)
class Rule:
    """Rows that one rule keeps, as they are: a scheme of `measure_one`."""

    name: str
    share: int
    worth: Callable[[Segment], Worth]

    def rows(self, segment: Segment) -> Ids:
        return heaviest(self.worth(segment)[self.name], self.share)

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        assert rows is not None
        return some_rows(kvs, rows), [0] * len(kvs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--batch", type=Path, default=SAMPLES / "questions.jsonl")
    parser.add_argument("--limit", type=int, default=12, help="questions; default 12")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.75, 0.5, 0.25], help="shares of the rows")
    parser.add_argument("--text", action="store_true", help="drop tokens before the prefill, not rows behind it")
    given = parser.parse_args()
    lines = given.batch.read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["question"] for line in itertools.islice(lines, given.limit)]
    with Store.open(given.store) as store:
        measure = measured_of_text if given.text else measured
        rows = measure(Session(store), asked, [round(100 * share) for share in given.keep])
    print(f"{len(asked)} questions; KL of the answer by share of the rows kept")
    print(f"{'':38}" + "".join(f"{share:9.0%}" for share in given.keep))
    for name, losses in rows.items():
        print(f"{name:38}" + "".join(f"{loss:9.4f}" for loss in losses))


def measured(session: Session, questions: Sequence[str], shares: Sequence[int]) -> dict[str, list[float]]:
    """The mean loss of each rule at each share."""
    rules, found = Rules(session), dict[tuple[str, int], list[float]]()
    for number, question in enumerate(questions, 1):
        plan = lay_out(session, Request(question), QueryOptions(), exactly=True).plan
        names = [*rules.of(plan.chunks[0])]
        schemes = {f"{share} {name}": Rule(name, share, rules.of) for name in names for share in shares}
        rows = measure_one(session, Question(plan), schemes)
        for scheme, rule in schemes.items():
            found.setdefault((rule.name, rule.share), []).append(float(rows[scheme]["kl_answer"]))
        print(f"{number} of {len(questions)}", file=sys.stderr)
    return means(found, shares)


def means(found: Mapping[tuple[str, int], Sequence[float]], shares: Sequence[int]) -> dict[str, list[float]]:
    mean = {key: sum(losses) / len(losses) for key, losses in found.items()}
    return {name: [mean[name, share] for share in shares] for name in dict.fromkeys(name for name, _ in mean)}


# ---- text --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefilled:
    """Chunks that were computed here, and what a store has of the rest."""

    stored: KVSource
    made: Mapping[bytes, ChunkKV]

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        return [self._one(segment, layer, stats) for segment in segments]

    def _one(self, segment: Segment, layer: int, stats: ReadStats) -> LayerKV:
        kv = self.made.get(segment.source.chunk_id)
        return self.stored.read([segment], layer, stats)[0] if kv is None else (kv.keys[layer], kv.values[layer])


def surprise(session: Session, ids: Ids) -> torch.Tensor:
    """How little the model expects each token of a chunk behind its lead-in, in nats."""
    decoder, text = session.decoder, (*session.identity.lead_in.ids, *ids)
    cache = decoder.new_cache(len(text))
    cache.set_length(len(text))
    logits = decoder.compute(text, QueryRows.of(torch.arange(len(text)), decoder.device), cache, keep=len(ids) + 1)
    return -logits[:-1].log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].cpu()


def worth_of_text(session: Session, ids: Ids) -> Worth:
    """What each rule says of a chunk's tokens."""
    draw = random.Random(str(ids))
    return {
        "surprise (LLMLingua)": surprise(session, ids),
        "repeated": repeated(session.decoder, session.lead_in, [ids])[0],
        "by lot": torch.tensor([draw.random() for _ in ids]),
    }


def measured_of_text(session: Session, questions: Sequence[str], shares: Sequence[int]) -> dict[str, list[float]]:
    """The mean loss of each rule at each share, where the chunks' texts are shortened before they are prefilled."""
    decoder, found = session.decoder, dict[tuple[str, int], list[float]]()
    for number, question in enumerate(questions, 1):
        plan = lay_out(session, Request(question), QueryOptions(), exactly=True).plan
        reference = Reference.answered(decoder, fuse(decoder, plan, Reuse(), session.source, 40), 32)
        worth = [worth_of_text(session, segment.ids) for segment in plan.chunks]
        for name, share in itertools.product(worth[0], shares):
            short, source = shortened(session, plan, [heaviest(one[name], share) for one in worth])
            distance = reference.force(fuse(decoder, short, Reuse(), source, 40)).distance
            found.setdefault((name, share), []).append(distance.kl_answer)
        print(f"{number} of {len(questions)}", file=sys.stderr)
    return means(found, shares)


def shortened(session: Session, plan: Plan, kept: Sequence[Ids]) -> tuple[Plan, KVSource]:
    """A prompt of the tokens that are kept of each chunk, and their KV."""
    made: dict[bytes, ChunkKV] = {}
    chunks = []
    for number, (segment, tokens) in enumerate(zip(plan.chunks, kept, strict=True)):
        ids, key = tuple(segment.ids[token] for token in tokens), bytes([number])
        (made[key],) = prefill_chunks(session.decoder, session.lead_in, [PrefillItem(ids)])
        chunks.append(Candidate(ids, key, level="raw"))
    laid_out = build_plan(plan.segments[0].source, chunks, plan.segments[-1].ids)
    return laid_out, Prefilled(session.source, made)


if __name__ == "__main__":
    main()
