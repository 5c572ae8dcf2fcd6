"""The page of model families says what the tests cover."""

from __future__ import annotations

import re

from samples.tools import families
from tests.families import FAMILIES, HYBRIDS, tiny_model
from tests.fusion.making import decoder_of
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS


def test_page_lists_every_family_and_no_other() -> None:
    listed = re.findall(r"([\w.-]+)\** \(`(\w+)`\)", families.PAGE.read_text(encoding="utf-8"))
    made = FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS
    assert sorted(listed) == sorted((name, type(config()).__name__) for name, config in made.items())
    assert len({config for _, config in listed}) >= 30


def test_readme_counts_the_tested_families() -> None:
    assert families.readme() == families.README.read_text(encoding="utf-8")


def test_page_has_the_layers_of_the_built_models() -> None:
    """Of some: the whole page takes a minute (`samples/tools/families.py --check`)."""
    page = families.PAGE.read_text(encoding="utf-8")
    for name in ("llama", "gemma3", "gpt-oss", "deepseek-v2", "smollm3"):
        (line,) = re.findall(rf"^.*\b{name}\** \(`.*", page, re.MULTILINE)
        assert line.startswith(f"| {families.layers_of(decoder_of(tiny_model(name)))} | all |")
