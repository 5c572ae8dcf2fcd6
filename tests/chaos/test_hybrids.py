"""Models that keep states, in trouble: concurrent processes, full disks, prunes, merges, talks.

Kills are among the commands of `commands.py`; what is wrong under a right digest is in
`tests/query/test_recurrent.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.query.reply import Request
from tests.chaos.hybrids import FIRST, SECOND, ask, asked, ingest, make_hybrid
from tests.chaos.processes import limit_files, start_kvtool
from tests.cli.working import CHUNKS, damages, emptied, kvtool, write_corpus
from tests.families import save_tiny
from tests.serve.conftest import KEY, serving

FAMILIES = ("qwen3-next", "qwen3.5", "bamba", "lfm2", "falcon-h1")


def stretches(store: Path) -> dict[str, int]:
    with Store.open(store) as opened:
        return dict(opened.stats()["checkpoints"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrids"))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


# ---- at the same time --------------------------------------------------------------------------------------------


def ended(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    row: dict[str, Any] = json.loads(out)
    return row


@pytest.mark.slow
@pytest.mark.nightly
def test_concurrent_queries_and_ingests(made: Path, store: Path, tmp_path: Path) -> None:
    truth = {
        (question, document): ask(store, question, "full", document=document).json["answer"]
        for question in (FIRST, SECOND)
        for document in ("mill1.md", "mill2.md")
    }
    folder = tmp_path / "more"
    write_corpus(folder / "corpus", 6)
    new = ("ingest", folder / "corpus", "--store", store, "--lock-wait", "300", "--json")
    ingests = [start_kvtool(*new, "--shard", f"{number}/2") for number in (1, 2)]
    path = str(made / "corpus")
    asking = {pair: start_kvtool(*asked(store, pair[0], "prefix", document=f"{path}/{pair[1]}")) for pair in truth}
    for pair, child in asking.items():
        assert ended(child)["answer"] == truth[pair], pair
    assert sum(ended(child)["documents"]["added"] for child in ingests) == 6
    assert damages(store) == []
    for (question, document), answer in truth.items():
        row = ask(store, question, "prefix", document=f"{path}/{document}").json
        assert row["answer"] == answer
        assert ask(store, question, "prefix", document=f"{path}/{document}").json["tokens"]["reused"] > 0


# ---- no space ----------------------------------------------------------------------------------------------------


def test_query_on_a_full_disk_stores_no_state(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied(store)
    answer = ask(store, FIRST, "full").json["answer"]
    with monkeypatch.context() as full:
        full.setenv("KVTOOL_DISK_RESERVE", str(2**60))
        done = ask(store, FIRST, "prefix")
        assert "could not be stored" in done.err
        assert done.json["answer"] == answer
        assert stretches(store)["count"] == 0
    assert damages(store) == []
    ask(store, FIRST, "prefix")
    assert ask(store, FIRST, "prefix").json["tokens"]["reused"] > 0


@pytest.mark.slow
def test_query_at_a_file_size_limit_stores_no_state(store: Path) -> None:
    """The very error of a full disk, from the kernel, in the middle of what is put."""
    answer = ask(store, FIRST, "full").json["answer"]
    data = next((store / "data").glob("gen-*/data.mdb"))
    done = limit_files(data.stat().st_size // 1024 + 8, *asked(store, FIRST, "prefix"))
    assert done.returncode == 0, done.stderr
    assert "could not be stored" in done.stderr
    assert json.loads(done.stdout)["answer"] == answer
    assert damages(store) == []
    ask(store, FIRST, "prefix")
    row = ask(store, FIRST, "prefix").json
    assert row["answer"] == answer
    assert {chunk["status"] for chunk in row["chunks"]} == {"exact"}


# ---- conversations -----------------------------------------------------------------------------------------------


def test_prune_between_two_turns_of_a_conversation(store: Path) -> None:
    warned: list[str] = []

    def turns(prune: bool, mode: str) -> list[str]:
        with package.open(store, warn=lambda text, hint: warned.append(text)) as cache:
            talk = cache.conversation(fusion=mode, max_tokens=6)
            first = talk.ask(Request(FIRST, documents=("mill2.md",)))
            if prune:
                emptied(store)
                assert stretches(store)["count"] == 0
            second = talk.ask(Request(SECOND, documents=("mill3.md",)))
            assert second.tokens["resident"] >= first.tokens["prompt"]
            return [first.answer, second.answer]

    assert turns(False, "prefix") == turns(True, "prefix")
    assert damages(store) == []
    assert warned == []


def talk_over_http(url: str, about: str) -> list[str]:
    import httpx2

    messages: list[dict[str, str]] = []
    for question in (f"Who built the {about} mill?", "And when was that?", "What does it grind?"):
        messages.append({"role": "user", "content": question})
        with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as client:
            reply = client.post("/v1/chat/completions", json={"model": "kvtool", "messages": messages})
        assert reply.status_code == 200, reply.text
        messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
    return [message["content"] for message in messages]


@pytest.mark.slow
def test_concurrent_conversations_with_a_server(store: Path) -> None:
    with serving(store) as served:
        alone = [talk_over_http(served.url, about) for about in ("first", "third")]
    with serving(store) as served, ThreadPoolExecutor(2) as both:
        assert [*both.map(lambda about: talk_over_http(served.url, about), ("first", "third"))] == alone
    assert damages(store) == []


# ---- every family, through everything that keeps and sends state checkpoints ---------------------------------------


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_corpus(tmp_path / "corpus", 4, 3, parts=2)
    save_tiny(request.param, tmp_path / "model")
    return tmp_path


@pytest.mark.slow
def test_merge_export_and_import_keep_answers(family: Path) -> None:
    whole, parts = family / "whole", [family / "one", family / "two"]
    exactly = ("--store-dtype", "float32")
    ingest(family, whole, *exactly).fine()
    for number, part in enumerate(parts, 1):
        ingest(family, part, *exactly, "--shard", f"{number}/2").fine()
    truth = {mode: ask(whole, FIRST, mode).json for mode in ("prefix", "full")}
    kvtool("store", "import", *parts, "--store", family / "merged", "--mine").fine()
    kvtool("store", "export", family / "one.kvpack", "--store", family / "merged").fine()
    kvtool("store", "import", family / "one.kvpack", "--store", family / "taken", "--mine").fine()
    for place in (family / "merged", family / "taken"):
        for mode, row in truth.items():
            there = ask(place, FIRST, mode, "--model", family / "model").json
            assert there["answer"] == row["answer"]
        assert damages(place) == []


@pytest.mark.some(1)
@pytest.mark.slow
def test_float16_store_of_states(family: Path) -> None:
    """Rows are rounded to it, states are not; what is beyond it is refused, not kept."""
    ingest(family, family / "store", "--store-dtype", "float16").fine()
    full = ask(family / "store", SECOND, "full").json
    ask(family / "store", FIRST, "prefix")
    prefix = ask(family / "store", SECOND, "prefix", "--compare", "prefix").json["runs"]
    assert {run["fusion"] for run in prefix} == {"full", "prefix"}
    assert abs(prefix[1]["kl_answer"]) < 1e-2
    assert prefix[0]["answer"] == full["answer"]
    assert damages(family / "store") == []


@pytest.mark.slow
def test_states_of_another_model_are_refused(made: Path, store: Path, tmp_path: Path) -> None:
    """Of the same shapes: their names depend on the model's weights, and a pack of another model is refused."""
    other = save_tiny("qwen3.5", tmp_path / "model", seed=1)
    there = tmp_path / "there"
    kvtool("ingest", made / "corpus", "--model", other, "--store", there, *CHUNKS, "--store-dtype", "float32")
    ask(store, FIRST, "prefix")
    ask(there, FIRST, "prefix")
    with Store.open(store) as one, Store.open(there) as two:
        assert one.stretches()
        assert one.stretches().keys().isdisjoint(two.stretches())
    kvtool("store", "export", tmp_path / "one.kvpack", "--store", there).fine()
    before = stretches(store)
    refused = kvtool("store", "import", tmp_path / "one.kvpack", "--store", store)
    assert refused.code == 12, refused.err
    merged = kvtool("store", "import", store, there, "--store", tmp_path / "merged")
    assert merged.code == 12, merged.err
    assert stretches(store) == before
    wrong = kvtool(*asked(store, FIRST, "prefix"), "--model", other)
    wrong.failed(12)
