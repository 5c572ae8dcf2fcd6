"""Options of retrieval."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.model.options import NetworkOptions, embedder_option
from kvtool.core.options.option import option

CHUNKS = "Chunks"  # the heading in the commands' help


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(NetworkOptions, sections=("query",), group=CHUNKS):
    """Options of how chunks are found. `retriever` auto: by both where the store has vectors. `min_score`: vectors
    alone drop nothing, since cosines of helpful and other chunks differ too little."""

    top_k: int = option(5, "Maximum chunks (passages) to retrieve.", lowest=1)
    min_score: float = option(
        0.7,
        "Drop chunks that score below this share of the best and match no further word of the question; 0 drops none.",
        parameter="search.min_score",
        lowest=0,
        highest=1,
    )
    source: tuple[str, ...] = option(
        (),
        "Search only documents whose path matches.",
        flag="--source",
        parameter="search.source",
        setting=False,
        metavar="GLOB",
    )
    retriever: str = option(
        "auto",
        "Search by words (bm25), by meaning (dense) or by both; auto uses what the store has.",
        choices=("auto", "bm25", "dense", "hybrid"),
    )
    embedder: str | None = embedder_option(CHUNKS)
    order: str = option(
        "best-last",
        "Order of the retrieved chunks in the prompt; with --defer, of each round.",
        parameter="search.order",
        choices=("relevance", "best-last", "document"),
    )
