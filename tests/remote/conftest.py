"""The fixtures of a shared store's tests."""

from tests.cli.working import built, corpus, fresh, store, tiny
from tests.remote.serving import behind, blobs, no_packs, redis_server, redis_url, s3_server, s3_url, small_packs, url

__all__ = [
    "behind",
    "blobs",
    "built",
    "corpus",
    "fresh",
    "no_packs",
    "redis_server",
    "redis_url",
    "s3_server",
    "s3_url",
    "small_packs",
    "store",
    "tiny",
    "url",
]
