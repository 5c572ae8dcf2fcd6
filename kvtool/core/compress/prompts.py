"""Prompts that a loss is measured on: a store's own chunks, asked about in their own words."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.cache.identity import ids_digest
from kvtool.core.compress.fisher import probes
from kvtool.core.compress.loss import Question
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.records.read import exact_level
from kvtool.core.session.session import Session


def own_prompts(session: Session, chunks: Sequence[tuple[bytes, str]], count: int) -> list[Question]:
    """Make prompts over chunks that are stored exactly, other ones than those that a profile is fitted with."""
    store, identity = session.store, session.identity
    described = [(chunk, level, info) for chunk, level in chunks if (info := store.chunk_info(chunk)) is not None]
    level = exact_level(store, identity.prefix_id) if identity.prefix else None
    prefix = Candidate(identity.prefix, identity.prefix_id, ids_digest([]), level)
    made = probes([info.token_ids for _, _, info in described], session.parts, session.tokenizer, count, seed=1)
    prompts = []
    for probe in made:
        own = [described[number] for number in probe.chunks]
        candidates = [Candidate(info.token_ids, chunk, info.lead_in, level) for chunk, level, info in own]
        prompts.append(Question(build_plan(prefix, candidates, probe.question)))
    return prompts
