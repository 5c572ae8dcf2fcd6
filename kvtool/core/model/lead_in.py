"""Which token ids a chunk is prefilled behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtool.core.common.types import Ids
from kvtool.core.errors import UsageError
from kvtool.core.model.prompt import PromptParts, chunk_tokens, warm_passages

# One passage gives most of what warming gives (kvtool/docs/concepts.md); every row costs attention at ingest: behind
# two of them a 135M model prefills at 0.8 of its plain speed, behind one at 0.9.
WARM_PASSAGES = 1


def lead_in_ids(mode: str, tokenizer: Any, parts: PromptParts) -> Ids:
    """Token ids of a lead-in that all chunks share (kvtool/docs/concepts.md; `sink:N` is EPIC's LegoLink-0).

    Raises
    ------
    UsageError : no such lead-in, or the tokenizer has no BOS to make it of.
    """
    if mode == "warm":
        return parts.prefix + warm_passages(tokenizer, WARM_PASSAGES)
    if mode in ("prefix", "neighbour"):
        return parts.prefix
    if mode == "none":
        return ()
    if mode == "bos" or mode.startswith("sink:"):
        return (_bos(tokenizer),) * (1 if mode == "bos" else int(mode.removeprefix("sink:")))
    return parts.prefix + _from_file(Path(mode), tokenizer)


def _bos(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UsageError("the tokenizer has no BOS token to lead in with", "use --lead-in warm or prefix")


def _from_file(path: Path, tokenizer: Any) -> Ids:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the lead-in {str(path)!r} cannot be read: {error}", "give a UTF-8 text file") from error
    if not text:
        raise UsageError(f"the lead-in {str(path)!r} is empty", "give a text file with a paragraph or two")
    return chunk_tokens(tokenizer, [text])[0]
