"""Fixtures of shared stores."""

from tests.remote.backends import behind, url  # noqa: F401
from tests.remote.object_stub import serve  # noqa: F401
from tests.remote.serving import blobs, no_packs, redis_server, s3_server, small_packs  # noqa: F401
