"""The fixtures of a shared store's tests."""

from tests.cli.working import built, corpus, fresh, store, tiny
from tests.remote.serving import redis_server, redis_url, url

__all__ = ["built", "corpus", "fresh", "redis_server", "redis_url", "store", "tiny", "url"]
