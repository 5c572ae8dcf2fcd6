"""Checks of what has to hold of a store and of its answers after any changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.integrity import find_damage
from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import known, level_of
from kvtool.core.common.types import Ids
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.query.reply import Reply
from kvtool.core.records.read import read_layer, stored_rows
from kvtool.core.session.identity import ProfileCache, StoreIdentity, store_identity
from tests.fusion.making import MOE, distance, rms
from tests.fuzzing.reference import Reference
from tests.fuzzing.runs import WrongError

_SAME = 2e-4  # largest difference of logits that deviate by 3, in float32
_ROUNDED = 0.2  # of logits whose KV was rounded to bfloat16, over their deviation; broken: 0.5 and more
_TIE = 2e-3  # between the two best logits: either may be said


def require(holds: bool, what: str) -> None:
    """Fail with `what` unless it holds."""
    if not holds:
        raise WrongError(what)


@dataclass
class Checks:
    """Holds a store and its answers against what they have to be."""

    reference: Reference
    # token ids of all lead-ins that chunks of this life were ever prefilled after, by digest
    lead_ins: dict[bytes, Ids] = field(default_factory=lambda: {ids_digest([]): ()})
    done: Counter[str] = field(default_factory=Counter)  # how many checks there were, by name

    @property
    def tokenizer(self) -> object:
        return self.reference.decoder.loaded.tokenizer

    # ---- the store ----

    def store(self, path: Path, committed: Mapping[str, str], current: bool = False) -> None:
        """Hold all documents, `committed` by their sources, against their texts, their chunks against their tokens, and
        these chunks' names. `current`: all of it was ingested after the lead-in that the store has now."""
        with Store.open(path) as store:
            identity = store_identity(store)
            require(set(store.sources()) == set(committed), f"documents {_apart(store.sources(), committed)} are wrong")
            for source, text in committed.items():
                document = store.document(source)
                require(document is not None and document.text.strip() == text.strip(), f"the text of {source} differs")
                assert document is not None
                texts = [document.text[ref.start : ref.end] for ref in document.chunks]
                before: Ids = ()
                for ref, ids in zip(document.chunks, chunk_tokens(self.tokenizer, texts), strict=True):
                    info = store.chunk_info(ref.chunk_id)
                    require(info is not None, f"a chunk of {source} has no description")
                    assert info is not None
                    require(info.token_ids == ids, f"the token ids of a chunk of {source} are not those of its text")
                    self._named(identity, ref.chunk_id, info, before, current)
                    before = ids
        self.done["store"] += 1

    def _named(self, identity: StoreIdentity, name: bytes, info: ChunkInfo, before: Ids, current: bool) -> None:
        own = identity.lead_in
        for ids in (own.ids, (*own.ids, *before)):
            self.lead_ins[ids_digest(ids)] = tuple(ids)
        named = chunk_id(
            namespace=identity.namespace,
            model_fingerprint=identity.fingerprint,
            lead_in=info.lead_in,
            token_ids=info.token_ids,
        )
        require(named == name, "a chunk's name is not that of its tokens behind its lead-in")
        if current:
            wanted = own.digest(before if own.mode == "neighbour" else ())
            require(info.lead_in == wanted, f"a chunk stands behind another lead-in than {own.mode}")

    def sound(self, path: Path) -> None:
        with Store.open(path) as store:
            damages = [damage.reason for damage in find_damage(store, Fraction(1))]
        require(not damages, f"verify: {damages[:3]}")
        self.done["verify"] += 1

    def records(self, path: Path, dice: random.Random, most: int = 3) -> None:
        """Some chunks' records at every level against KV that is computed now: the same, or within the stated error."""
        with Store.open(path) as store:
            prefix = store_identity(store).prefix_id
            names = sorted(name for name in store.chunk_ids() if store.levels(name) and name != prefix)
            shelf = ProfileCache(store)
            for name in dice.sample(names, min(most, len(names))):
                info = store.chunk_info(name)
                if info is None or info.lead_in not in self.lead_ins:
                    continue
                for level in known(store.levels(name)):
                    self._record(store, name, info, level, shelf)

    def _record(self, store: Store, name: bytes, info: ChunkInfo, level: str, shelf: ProfileCache) -> None:
        fresh = self.reference.kv(info.token_ids, self.lead_ins[info.lead_in])
        for layer in range(info.layers):
            (item,) = read_layer(store, [name], level, layer)
            require(isinstance(item, Encoded), f"level {level} cannot be read: {item}")
            assert isinstance(item, Encoded)
            rows = stored_rows(item, level)
            (made,) = CODECS[level].decode([item], layer, shelf)
            stated = (0.0, 0.0) if level_of(level).lossless else CODECS[level].stated_error(item.payload)
            for exact, side, error in zip((fresh.keys[layer], fresh.values[layer]), made, stated, strict=True):
                wanted = exact if rows is None else exact[:, list(rows)]
                off = float((side.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12))
                # A mixture of experts, and a lead-in of one's own, are computed in another batch.
                rounding = 1e-5 if self.reference.store_dtype == "float32" else 0.01
                require(
                    off <= error * 1.01 + rounding, f"level {level}, layer {layer}: {off:.2g} off, says {error:.2g}"
                )
        self.done["lossless record" if level_of(level).lossless else "lossy record"] += 1

    # ---- answers ----

    def answer(self, reply: Reply, committed: Mapping[str, str], count: int, alone: bool = True) -> None:
        """Hold an answer of `count` tokens against plain transformers where it has to be exact, against fresh KV where
        it is not. `alone`: no turns come before it."""
        plan = reply.fused.plan
        for chunk, segment in zip(reply.chunks, plan.chunks, strict=True):
            require(chunk.source in committed, f"an answer from {chunk.source}, which is not there")
            require(chunk.text in committed[chunk.source], f"a passage that {chunk.source} does not have")
            (ids,) = chunk_tokens(self.tokenizer, [chunk.text])
            require(segment.source.ids == ids, f"the prompt's tokens are not those of a passage of {chunk.source}")
        self.done["passages"] += 1
        if reply.fusion == "full" or (reply.fusion == "prefix" and self._states) or self._is_everything(reply):
            self._full(reply, count)
        elif not self._states and alone and not any(segment.status == "resident" for segment in plan.segments):
            self._over_stored(reply, count)

    @property
    def _states(self) -> bool:
        return self.reference.decoder.keeps_states

    def _is_everything(self, reply: Reply) -> bool:
        return not self._states and bool((reply.fused.recomputed | ~reply.fused.plan.hit_rows()).all())

    def _full(self, reply: Reply, count: int) -> None:
        plan, name = reply.fused.plan, "full" if reply.fusion == "full" else "recompute everything"
        reads = reply.fusion != "full" and self._rounded(plan)
        try:
            self._same(reply.fused.logits, self.reference.full(plan), f"{reply.fusion} is not transformers' own", reads)
        except WrongError:
            if self.reference.family not in MOE or not self.reference.jumps(plan.ids):
                raise
            self.done["tie of experts"] += 1
            return
        self.done[name] += 1
        if plan.dropped or reads:
            return
        said, wanted = tuple(reply.generated.ids), self.reference.text(plan.ids, count)
        if said != wanted:
            self._tie([*plan.ids], said, wanted)
        self.done["greedy text"] += 1

    def _tie(self, prompt: list[int], said: Ids, wanted: Ids) -> None:
        """Another text is right only from where two tokens are as good as each other."""
        at = next(
            (n for n, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), min(len(said), len(wanted))
        )
        best = self.reference.next_logits([*prompt, *said[:at]]).topk(2).values
        require(float(best[0] - best[1]) < _TIE, f"greedy text {said} is not {wanted}")

    def _over_stored(self, reply: Reply, count: int) -> None:
        """Check exact levels only: the lossy ones are held against the error that they state (`records`)."""
        plan, selector = reply.fused.plan, reply.selector
        if not all(level_of(one.source.level or "raw").lossless for one in plan.cached):
            return
        if not all(one.source.lead_in in self.lead_ins for one in plan.cached):
            return
        rounded = self._rounded(plan)
        fresh = self.reference.fused(plan, selector, self.lead_ins, count)
        self._same(reply.fused.logits, fresh.logits, f"{reply.fusion} is not what fresh KV gives", rounded)
        self.done["fresh KV"] += 1
        if reply.fusion == "reuse" or (isinstance(selector, Epic) and not selector.shift):
            computed = reply.fused.recomputed | plan.mask("miss")
            plain = self.reference.over_reused(plan, self.lead_ins, computed)
            self._same(reply.fused.logits, plain, f"{reply.fusion} is not transformers over fresh KV", rounded)
            self.done["transformers over fresh KV"] += 1

    def _rounded(self, plan: Plan) -> bool:
        return self.reference.store_dtype != "float32" and bool(plan.cached)

    def _same(self, ours: torch.Tensor, wanted: torch.Tensor, what: str, rounded: bool = False) -> None:
        off = distance(ours, wanted)
        if rounded:
            off = rms(ours.cpu() - wanted.cpu()) / rms(wanted - wanted.mean())
            require(off <= _ROUNDED, f"{what}: {off:.2g} of its deviation")
        else:
            require(off <= _SAME, f"{what}: logits differ by {off:.2g}")

    def alike(self, one: Reply, other: Reply, what: str) -> bool:
        """Two answers from the same store: the same prompt, sources and logits. False: they were made otherwise."""
        made_of = [[(len(s.ids), s.status, s.source.level) for s in r.fused.plan.segments] for r in (one, other)]
        found = [[(chunk.place, chunk.score) for chunk in reply.chunks] for reply in (one, other)]
        same = one.fused.plan.text_ids == other.fused.plan.text_ids
        require(same, f"{what}: other token ids: {made_of}, {found}")
        require([(c.id, c.source) for c in one.chunks] == [(c.id, c.source) for c in other.chunks], f"{what}: sources")
        if one.selector != other.selector:
            require("auto" in (one.asked_mode, other.asked_mode), f"{what}: {one.selector} and {other.selector}")
            return False  # a matter of the machine's speed
        states = [[(s.status, s.source.level) for s in reply.fused.plan.segments] for reply in (one, other)]
        if states[0] != states[1]:
            return False  # what the first one lacked it has stored
        off = distance(one.fused.logits, other.fused.logits)
        allowed = _SAME if self.reference.family in MOE else 1e-5
        require(off <= allowed, f"{what}: logits differ by {off:.2g} ({one.selector}, {states[0]})")
        require(one.answer == other.answer, f"{what}: {one.answer!r} and {other.answer!r}")
        self.done["two sessions"] += 1
        return True


def _apart(one: object, other: Mapping[str, str]) -> str:
    found = set(one)  # type: ignore[call-overload]
    return f"{sorted(found ^ set(other))[:4]}"
