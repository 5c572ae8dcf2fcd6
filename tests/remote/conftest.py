"""The fixtures of a shared store's tests."""

from tests.cli.working import built, corpus, fresh, store, tiny
from tests.remote.backends import az_url, behind, gs_url
from tests.remote.serving import blobs, no_packs, redis_server, redis_url, s3_server, s3_url, small_packs, url

__all__ = [
    "az_url",
    "behind",
    "blobs",
    "built",
    "corpus",
    "fresh",
    "gs_url",
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
