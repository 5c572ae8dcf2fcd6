"""Audits over many answers: distributions by run, level and lead-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtool.core.cache.store import Store
from kvtool.core.evaluate.measures import keep_audit
from kvtool.core.session.identity import store_identity
from kvtool.reports.stored import audit_overview, quantiles
from tests.cli.working import QUESTION, SHORT, kvtool
from tests.evaluate.test_audits import made
from tests.reports.test_page import Outline

DAY = 86400
START = 1_700_000_000 // DAY * DAY


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantiles([3.0]) == {"median": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    values = [float(value) for value in np.random.default_rng(0).permutation(200)]
    assert quantiles(values) == {"median": 99.0, "p90": 179.0, "p99": 197.0, "max": 199.0}


def test_runs_levels_and_lead_ins_stand_apart() -> None:
    audits = [
        *(made(number, kl_answer=0.1 * number, question=f"q{number}") for number in range(4)),
        made(kl_answer=9.0, levels=["2"], answer_equal=False),
        made(lead_in="prefix", sampled=True),
        made(fusion="reuse", amount=None, top1_agrees=False, holes=2),
    ]
    value = audit_overview(audits)
    assert (value["questions"], value["since"], value["until"]) == (7, 0, 3)
    rows = {(row["run"], *row["levels"], row["lead_in"]): row for row in value["runs"]}
    assert len(rows) == 4
    first = value["runs"][0]
    assert first["count"] == 4
    assert first["kl_answer"] == pytest.approx(0.15)
    spread = {"median": 0.1, "p90": pytest.approx(0.3), "p99": pytest.approx(0.3), "max": pytest.approx(0.3)}
    assert first["spread"]["kl_answer"] == spread
    assert first["worst"]["question"] == "q3"
    assert first["recomputed_share"] == pytest.approx(15 / 95)
    assert rows["union:0.15", "2", "warm"]["answer_equal"] == 0
    assert rows["union:0.15", "raw", "prefix"]["sampled"] == 1
    assert (rows["reuse", "raw", "warm"]["incomplete"], rows["reuse", "raw", "warm"]["top1_agrees"]) == (1, 0)


@pytest.mark.slow
def test_the_report(store: Path, tmp_path: Path) -> None:
    kvtool("inspect", "audit", "--store", store).failed(1, "no answer of", "--audit 1")
    kvtool("query", QUESTION, "--store", store, *SHORT, "--fusion", "reuse", "--audit", "1").fine()
    with Store.open(store) as opened:
        fingerprint = store_identity(opened).fingerprint
        for day, kl in enumerate((0.0, 0.5, 2.0)):
            keep_audit(opened, fingerprint, made(START + day * DAY, kl_answer=kl, question="<b>Who?</b>"))
            keep_audit(opened, fingerprint, made(START + day * DAY, kl_answer=kl, levels=["3"], sampled=True))
    html = tmp_path / "page.html"
    done = kvtool("inspect", "audit", "--store", store, "--html", html).fine()
    for text in ("union:0.15", "reuse", "7 audits, 2023-11-14", "<b>Who?</b>", "sampled answers: 3"):
        assert text in done.out
    page = Outline(html.read_text(encoding="utf-8"))
    assert page.tags.count("table") == 1
    assert "<b>Who?</b>" in page.text
    assert str(START) not in page.text  # a time for people
    value = kvtool("inspect", "audit", "--store", store, "--json").fine().json
    rows = [(row["run"], row["levels"], row["count"]) for row in value["runs"]]
    assert rows == [("union:0.15", ["raw"], 3), ("union:0.15", ["3"], 3), ("reuse", ["raw"], 1)]
