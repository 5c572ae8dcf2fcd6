"""Reference logits of an answer: by plain `transformers`, and by the same mode over KV that is computed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from tests.families import HYBRIDS
from tests.fusion.making import Ids, distance, plain_logits, plain_model, plain_text
from tests.fusion.test_against_transformers import forward

JUMP = 1e-3  # of logits that deviate by 3, and differ by 1e-5 where the input is rounded
LeadIns = Mapping[bytes, Ids]  # token ids by their digest


@cache
def loaded(folder: Path, store_dtype: str) -> Decoder:
    made = load_model(resolve(str(folder), offline=True), device="cpu", dtype=store_dtype, arithmetic="float32")
    return Decoder(made, kv_dtype=getattr(torch, store_dtype))


@dataclass
class Reference:
    """A family's model as a reference for kvtool: unmodified, and with KV that no store has seen. `store_dtype`: the
    number format of the KV; all is computed in float32."""

    family: str
    folder: Path
    store_dtype: str
    _fresh: dict[tuple[Ids, Ids], ChunkKV] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the embeddings as `transformers` loads them: of Youtu it leaves the padding token's row zero."""
        read = AutoModelForCausalLM.from_pretrained(self.folder).get_input_embeddings().weight
        for attention in ((), ("eager",), ("sdpa",)):  # each is a model of its own
            plain_model(self.family, "float32", *attention).get_input_embeddings().weight.data.copy_(read)

    @property
    def decoder(self) -> Decoder:
        return loaded(self.folder, self.store_dtype)

    # ---- plain transformers ----

    def full(self, plan: Plan) -> torch.Tensor:
        if not plan.dropped:
            return plain_logits(self.family, "float32", tuple(plan.ids), self._attention)
        model = plain_model(self.family, "float32")
        return forward(model, plan.ids, plan.positions.tolist(), DynamicCache(), []).logits[0, -1]

    def text(self, ids: Sequence[int], count: int) -> Ids:
        return plain_text(self.family, "float32", tuple(ids), count)

    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        return plain_logits(self.family, "float32", tuple(ids), self._attention)

    def jumps(self, ids: Sequence[int]) -> bool:
        """Return True if rounding the input is enough to change the logits of transformers: a router's choice between
        two experts is a tie."""
        model, wanted = plain_model(self.family, "float32", self._attention), self.next_logits(ids)

        def rounded(module: object, given: object, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + 1e-6 * torch.randn_like(out))

        hook = model.get_input_embeddings().register_forward_hook(rounded)
        try:
            with torch.inference_mode(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                tries = [model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1] for _ in range(8)]
        finally:
            hook.remove()
        return max(distance(one, wanted) for one in tries) > JUMP

    @property
    def _attention(self) -> str:
        return "sdpa" if self.family in HYBRIDS else "eager"

    def over_reused(self, plan: Plan, lead_ins: LeadIns, computed: torch.Tensor) -> torch.Tensor:
        """Return logits where the rows that `computed` (bool `[length]`) has, and the question's, are computed over the
        rest. Each row of the rest was prefilled after its chunk's lead-in, at its final position.

        Nothing is moved here, and no code of kvtool runs.
        """
        model = plain_model(self.family, "float32")
        past, positions = DynamicCache(), plan.positions.tolist()
        kept = [place for place in range(plan.segments[-1].start) if not computed[place]]
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for segment in plan.segments[:-1]:
            wanted = [at for at in range(len(segment.ids)) if not computed[segment.start + at]]
            if wanted:
                parts.append(self._rows(model, segment, lead_ins[segment.source.lead_in], wanted))
        for layer in range(len(parts[0]) if parts else 0):
            keys, values = zip(*(part[layer] for part in parts), strict=True)
            past.update(torch.cat(keys, 2), torch.cat(values, 2), layer)
        rows = [place for place in range(plan.length) if place not in set(kept)]
        ids = plan.ids
        done = forward(
            model, [ids[r] for r in rows], [positions[r] for r in rows], past, [positions[place] for place in kept]
        )
        logits: torch.Tensor = done.logits[0, -1]
        return logits

    def _rows(
        self, model: object, segment: Segment, lead_in: Ids, wanted: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of some rows of a segment, prefilled without other chunks after its lead-in."""
        ids, first = segment.source.ids, segment.position
        alone = DynamicCache()
        forward(model, [*lead_in, *ids], range(first - len(lead_in), first + len(ids)), alone, [])
        tokens = [at if segment.placed_rows is None else segment.placed_rows[at] for at in wanted]
        places = [len(lead_in) + token for token in tokens]
        return [(layer.keys[:, :, places], layer.values[:, :, places]) for layer in alone.layers]

    # ---- kvtool's own modes over fresh KV ----

    def kv(self, ids: Ids, lead_in: Ids) -> ChunkKV:
        if (ids, lead_in) not in self._fresh:
            decoder = self.decoder
            (self._fresh[ids, lead_in],) = prefill_chunks(decoder, LeadIn(decoder, lead_in), [PrefillItem(ids)])
        return self._fresh[ids, lead_in]

    def fused(self, plan: Plan, selector: Selector, lead_ins: LeadIns, reserve: int) -> Fused:
        """The same plan and mode, over fresh KV."""
        kvs = {
            segment.source.chunk_id: self.kv(segment.source.ids, lead_ins[segment.source.lead_in])
            for segment in plan.cached
        }
        return fuse(self.decoder, plan, selector, MemorySource(kvs), reserve)
