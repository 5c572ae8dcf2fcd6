"""`--set NAME=VALUE`: parameters of fusion modes, sampling, search and loading, from every side."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import kvtool
from kvtool.cli.options import SETTINGS
from kvtool.core.errors import UsageError
from kvtool.core.fusion import options as fusion_options
from kvtool.core.fusion import selectors
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.options.option import options_of
from kvtool.core.options.resolve import Resolved, resolve
from kvtool.core.query.options import QueryOptions, every_parameter, shown_default
from tests.cli.working import kvtool as command
from tests.wording import refused

CONCEPTS = Path(kvtool.__file__).parent / "docs" / "guide" / "concepts.md"
SET = options_of(QueryOptions)["set"]


def by_flags(*pairs: str, folder: Path | None = None) -> Resolved:
    return resolve(SETTINGS, {SET: [*pairs]}, environ={}, folder=folder)


def test_parameters_reach_modes_and_fields() -> None:
    options = QueryOptions(set=("blend.metric=k_l1", "union.links=3", "defer.first=4", "load.timeout=500ms"))
    assert (options.defer_first, options.load_timeout) == (4, 0.5)
    assert selector_for(options, "blend") == Blend(metric="k_l1")
    assert selector_for(options, "union") == Union(links=3)
    assert QueryOptions(set="search.source=*.md").source == ("*.md",)  # type: ignore[arg-type]


def test_a_flag_adds_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text(
        '[set]\nblend.metric = "k_l1"\nload.timeout = "2 s"\nsampling.stop_repeats = false\n[query]\nratio = 0.3'
    )
    options = by_flags("load.timeout=500ms", "blend.check_layer=2", folder=tmp_path).get(QueryOptions)
    assert (options.load_timeout, options.stop_repeats) == (0.5, False)
    assert selector_for(options, "blend") == Blend(0.3, check_layer=2, metric="k_l1")
    (tmp_path / "kvtool.toml").write_text('[query.set]\n"blend.metric" = "k_sse"')
    assert selector_for(by_flags(folder=tmp_path).get(QueryOptions), "blend") == Blend(metric="k_sse")


def test_python_gives_a_mapping() -> None:
    options = QueryOptions.of({"set": {"blend.metric": "k_l1", "sampling.top_p": 0.9}})
    assert (options.top_p, options.set) == (0.9, ("blend.metric=k_l1",))
    shown = inspect.signature(kvtool.Cache.query).parameters
    assert shown["ratio"].default == 0.15
    assert not {"top_p", "options", "device"} & {*shown}
    assert not {"metric", "check_layer"} & {*options_of(QueryOptions)}


@pytest.mark.parametrize(
    "pair",
    [
        *("blnd.metric=k_l1", "blend.ratio=0.5", "blend.metric=l7", "union.links=-2", "infoflow.from_depth=2"),
        *("defer.first=0", "blend.metric"),
    ],
)
def test_a_wrong_parameter_is_a_usage_error(pair: str) -> None:
    with refused(UsageError, numbers=True):
        by_flags(pair).get(QueryOptions)


def test_the_command_refuses_an_unknown_name() -> None:
    command("query", "Who?", "--set", "union.pulling=last").failed(2, "union.pulling", "union.pooling")


def test_a_new_mode_needs_no_other_change(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Spread(Selector):
        name: ClassVar[str] = "spread"
        steps: int = 7

    kind_of = selectors.selector_class
    monkeypatch.setattr(selectors, "MODES", (*selectors.MODES, "spread"))
    monkeypatch.setattr("kvtool.core.query.options.MODES", selectors.MODES)
    for room in (selectors, fusion_options):
        monkeypatch.setattr(room, "selector_class", lambda mode: Spread if mode == "spread" else kind_of(mode))
    monkeypatch.setattr(fusion_options, "MODES", selectors.MODES)
    assert every_parameter()["spread.steps"].default == 7
    assert selector_for(QueryOptions(set=("spread.steps=3",)), "spread") == Spread(steps=3)


def test_the_documentation_lists_the_parameters() -> None:
    rows = [f"| `{each.parameter}` | {shown_default(each)} | {each.help} |" for each in every_parameter().values()]
    assert "\n".join(rows) in CONCEPTS.read_text("utf-8"), "put these into concepts.md:\n" + "\n".join(rows)
