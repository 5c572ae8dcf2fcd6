"""Options of the vectors that chunks are found by."""

from __future__ import annotations

from kvtool.core.options.option import option


def embedder_option(group: str) -> str | None:
    """The embedding model: an option of an ingest, which computes vectors, and of a query, which looks among them."""
    return option(
        None,
        "The embedding model for search by meaning.",
        group=group,
        metavar="NAME|FOLDER",
        instead="the store's own",
    )
