"""The page of model families says what the tests cover."""

from __future__ import annotations

import re

from samples.tools import families
from tests.families import FAMILIES, HYBRIDS
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS


def test_every_family_stands_on_the_page_and_no_other() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| `(\w+)`", families.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    made = FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS
    assert [name for name, _ in rows] == [*made]
    assert rows == [(name, type(config()).__name__) for name, config in made.items()]
    assert len({config for _, config in rows}) >= 30


def test_readme_counts_the_tested_families() -> None:
    assert families.readme() == families.README.read_text(encoding="utf-8")


def test_what_the_page_says_is_what_the_built_models_are() -> None:
    """Of some: the whole page takes a minute (`samples/tools/families.py --check`)."""
    page = families.PAGE.read_text(encoding="utf-8")
    for name in ("llama", "gemma3", "gpt-oss", "deepseek-v2", "smollm3"):
        assert families.row(name) in page
