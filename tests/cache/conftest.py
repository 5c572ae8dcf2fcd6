"""Two shared cores: a property test is never too slow."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
