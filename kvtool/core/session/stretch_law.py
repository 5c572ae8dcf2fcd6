"""Law 6 at the gate for a model that keeps states: stretches that another arithmetic has made serve as one's own do.

As with records (record_law.py) it is measured on what a question is about to use. A state is made of every token before
it, so no stretch is cut: a beginning of the prompt is held against itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.fusion.chain import fuse_chain
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.stretch import Found, ReadPart
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.quoting import quotation, quoted
from kvtool.core.session.record_law import Held, held

_MOST_TOKENS = 768


def made_beginning(segments: Sequence[Ids], found: Found, made: Arithmetic) -> int:
    """How many segments of a stored beginning to check with: they end with a state, and this arithmetic has made some
    of them. They have `_MOST_TOKENS` tokens at most, or there are no fewer; 0: it has made nothing of it."""
    infos, tokens = found.infos[: found.usable], list(accumulate(map(len, segments)))
    first = next((number for number, info in enumerate(infos, 1) if info and info.arithmetic == made), len(infos) + 1)
    ends = [number for number, info in enumerate(infos, 1) if number >= first and info and info.states]
    return max((end for end in ends if tokens[end - 1] <= _MOST_TOKENS), default=ends[0] if ends else 0)


def check_beginning(
    decoder: Decoder, segments: Sequence[Ids], found: Found, made: Arithmetic, read: ReadPart, allowed: float
) -> Held | None:
    """Hold a beginning of a prompt as it is stored against what this decoder computes of it.

    Parameters
    ----------
    segments : token ids of the beginning, the prompt's own instruction first; `found` names as many stretches.
    allowed : the largest difference of logits that rounding explains.

    Returns
    -------
    See `record_law.held`; None: some of it is damaged.
    """
    prefix, *chunks = segments
    first, script = quotation([ids for ids in segments if ids])
    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], (first,))
    fused = fuse_chain(decoder, plan, Prefix(), found, read, len(script)).fused
    if fused.tokens.fresh > 1:
        return None
    logits, cache = decoder.prefill(plan.ids, len(script))
    own, theirs = quoted(decoder, logits, cache, script), quoted(decoder, fused.logits, fused.cache, script)
    return held(decoder, f"states made in {made}", own, theirs, allowed)
