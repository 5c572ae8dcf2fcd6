"""Every target of the fuzzer over its seeds and some random changes of them, as a run of the tests can afford it."""

from __future__ import annotations

import random

import pytest

from tests.fuzzing import registry

_SLOW = {"gguf_model": 4, "config": 30, "safetensors": 30, "generation_config": 10, "tier": 20}
_SLOW |= {"tokenizer_config": 30}  # a process for each template
_TARGETS = registry.targets()


@pytest.mark.some(7)
@pytest.mark.parametrize("name", sorted(_TARGETS))
def test_seeds_and_changes_of_them(name: str) -> None:
    target, seeds = registry.loaded(name, _TARGETS[name])
    assert seeds
    for data in (*seeds, *registry.mutations(seeds, _SLOW.get(name, 200), random.Random(name))):
        target(data)
