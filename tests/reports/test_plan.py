"""Forecast of `inspect plan` for a windowed model: the records that a pass reads, from the configuration only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint import load
from kvtool.core.codec.levels import RAW
from kvtool.core.fusion.cost import LoadSpeed, PassSpeed, Speeds
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.selectors import MODES, selector_for
from kvtool.core.query.auto import spans_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.session.session import Session
from kvtool.reports.plan import expected_ms, plan_facts
from tests.cli.working import CHUNKS, LAYERS, PREFIX, QUESTION, kvtool, write_corpus
from tests.families import save_tiny

# A second for each token that all layers load; computing takes nothing.
SPEEDS = Speeds(PassSpeed(0.0, 0.0, 0.0), {RAW: LoadSpeed(0.0, 1.0, 0.0, 1.0)}, LAYERS)
OPTIONS = QueryOptions(top_k=8)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a tiny Gemma 2, three of whose four layers see 32 tokens."""
    folder = tmp_path_factory.mktemp("plan")
    save_tiny("gemma2", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        at = ("--store", folder / "store", "--model", folder / "model", *CHUNKS, *PREFIX)
        kvtool("ingest", write_corpus(folder / "corpus"), *at).fine()
    return folder / "store"


def test_windowed_layers_count_as_far_as_they_are_read(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(windowed) as store:
        loaded = Session.open(store)
        plan = lay_out(loaded, Request(QUESTION), OPTIONS).plan
        wanted = {}
        for mode in MODES:
            read = fuse(loaded.decoder, plan, selector_for(OPTIONS, mode), loaded.source).read_set.read
            wanted[mode] = 1e3 * sum(segment.stop - segment.start for layer in read for segment in layer) / LAYERS
        everything = 1e3 * sum(len(segment.ids) for segment in plan.cached)
        assert wanted["reuse"] < everything / 2

        def refuse(*args: object, **more: object) -> Any:
            raise AssertionError("the model was loaded")

        monkeypatch.setattr(load, "load_model", refuse)
        session = Session(store)
        assert expected_ms(session, plan, SPEEDS, OPTIONS) == pytest.approx(wanted)
        selectors = [selector_for(OPTIONS, mode) for mode in MODES]
        assert spans_of(session, plan, selectors) == spans_of(loaded, plan, selectors)  # what `--fusion auto` weighs
        facts = plan_facts(session, lay_out(session, Request(QUESTION), OPTIONS), OPTIONS, SPEEDS)
        assert facts["expected_ms"] == pytest.approx(wanted)
        assert facts["break_even"]["saved_ms"] == pytest.approx(wanted["full"] - wanted["union"])
        assert not session.is_loaded
