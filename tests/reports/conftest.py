from tests.cli.working import built, corpus, fresh, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]
