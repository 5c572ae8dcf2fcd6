"""Questions over chunks of a model that keeps states, computed alone: made, found, refused, damaged, pruned, packed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.cache.verify import verify
from kvtool.core.common.turns import Turns
from kvtool.core.session.alone import AloneMaker
from tests.cli.working import CHUNKS, PREFIX, SHORT, Done, emptied, kvtool, write_corpus
from tests.families import save_tiny
from tests.query.test_chains import FIRST, SECOND, flip, keys_of, stretches

ALONE = (*PREFIX, *CHUNKS, "--store-dtype", "float32")  # so that what is stored is what was computed


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and the documents and the model that it was made of beside it."""
    folder = tmp_path_factory.mktemp("apart")
    write_corpus(folder / "corpus")
    save_tiny("qwen3.5", folder / "model")
    done = kvtool("ingest", folder / "corpus", "--model", folder / "model", "--store", folder / "store", *ALONE)
    assert "no KV of chunks" not in done.fine().err
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def ask(store: Path, question: str = FIRST, *more: object, documents: str = "mill2.md") -> Done:
    asked = ("query", question, "--store", store, "--documents", documents, "--fusion", "reuse", *SHORT, "--json")
    return kvtool(*asked, *more).fine()


def statuses(row: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in row["chunks"]]


def test_ingest_computes_each_chunk_alone_once(made: Path, store: Path) -> None:
    with Store.open(store) as opened:
        alone = [info for info in opened.stretches().values() if info.alone]
        assert {one for info in alone for one in info.chunks} == {*opened.chunk_ids()}
        assert all(info.states and info.rows for info in alone)
        assert verify(opened) == []
    assert stretches(store)["alone"] == len(alone) > 5
    again = kvtool("ingest", made / "corpus", "--store", store, "--json").fine().json
    assert (again["chunks"]["computed"], again["documents"]["unchanged"]) == (0, 6)


def test_all_but_the_question_is_reused_and_the_loss_is_told(store: Path) -> None:
    row = ask(store, FIRST, "--token-ids").json
    assert statuses(row) == ["exact", *["hit"] * (len(row["chunks"]) - 1)]
    assert row["tokens"]["fresh"] == len(row["segments"]["question"])
    gate = kvtool("inspect", "gate", "--store", store, "--json").fine().json["apart"]
    assert gate["passed"]
    assert row["states"] == {"loss": gate["loss_by_mode"]["reuse"], "max_loss": 0.1}
    told = kvtool("query", FIRST, "--store", store, "--documents", "mill2.md", "--fusion", "reuse", *SHORT).fine()
    assert "approximate: the model keeps states" in told.err
    assert row["bytes_read"] > 0


def test_a_conversation_tells_the_loss_too(store: Path) -> None:
    done = kvtool("chat", "--store", store, "--fusion", "reuse", *SHORT, stdin=b"third mill\nsecond mill\n").fine()
    assert done.err.count("approximate: the model keeps states") == 2  # it stands in what the second goes on from


def test_a_chunk_at_the_beginning_is_exact(store: Path) -> None:
    first = ask(store).json["chunks"][0]["id"]
    asked = ("query", FIRST, "--store", store, "--chunks", first, *SHORT, "--json", "--compare", "reuse,epic")
    _, reuse, epic = kvtool(*asked).fine().json["runs"]
    assert statuses(reuse) == ["exact"]
    assert reuse["answer_equal"]
    assert epic["answer_equal"]
    assert abs(reuse["kl_answer"]) < 1e-6


def test_all_recomputed_is_the_full_answer(store: Path) -> None:
    asked = ("query", FIRST, "--store", store, "--documents", "mill2.md", *SHORT, "--json", "--link-tokens", "64")
    _, epic = kvtool(*asked, "--compare", "epic").fine().json["runs"]
    assert epic["answer_equal"]
    assert abs(epic["kl_answer"]) < 1e-6
    audited = kvtool(*asked[:-2], "--fusion", "reuse", "--audit", "1").fine()
    assert "audit: " in audited.err


def test_what_is_refused(made: Path, store: Path, tmp_path: Path) -> None:
    asked = ("query", FIRST, "--store", store, "--documents", "mill2.md", *SHORT)
    kvtool(*asked, "--fusion", "union").failed(2, "in the middle of a chunk", "as an approximation")
    kvtool(*asked, "--fusion", "epic", "--link", "final").failed(2, "in the middle of a chunk")
    kvtool(*asked, "--fusion", "reuse", "--max-state-loss", "0").failed(12, "nats a token", "--max-state-loss 0.")
    forced = kvtool(*asked, "--fusion", "reuse", "--max-state-loss", "0", "--force", "--json").fine()
    assert forced.json["states"]["max_loss"] == 0
    assert kvtool(*asked, "--json").fine().json["fusion"] == "prefix"  # off unless asked for
    other = ("ingest", made / "corpus", "--model", made / "model", "--store", tmp_path / "other", *CHUNKS)
    kvtool(*other).fine()
    without = kvtool("query", FIRST, "--store", tmp_path / "other", "--fusion", "reuse")
    without.failed(2, "computed alone", "--lead-in warm")
    kvtool("ingest", made / "corpus", "--store", tmp_path / "other", "--lead-in", "neighbour").failed(2, "lead-in")


def test_fewer_link_tokens_than_the_gate_takes_are_held_to_the_loss_of_reuse(store: Path) -> None:
    gate = kvtool("inspect", "gate", "--store", store, "--json").fine().json["apart"]["loss_by_mode"]
    assert gate["epic"] < gate["reuse"]
    asked = ("query", FIRST, "--store", store, "--documents", "mill2.md", *SHORT, "--fusion", "epic")
    between = (*asked, "--max-state-loss", (gate["epic"] + gate["reuse"]) / 2, "--json")
    assert kvtool(*between).fine().json["states"]["loss"] == gate["epic"]
    kvtool(*between, "--link-tokens", "0").failed(12, "nats a token")
    assert kvtool(*asked, "--link-tokens", "0", "--json").fine().json["states"]["loss"] == gate["reuse"]


def test_a_chunk_that_is_too_long_takes_no_other_file_along(made: Path, tmp_path: Path) -> None:
    """The same short chunk is in a file with a chunk that the model cannot hold, and in one without."""
    folder, short = tmp_path / "long", "The common chunk of both files says that the mill is blue."
    folder.mkdir()
    texts = (short, " ".join(f"word{number}" for number in range(1200)))
    rows = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\n".join(rows), "utf-8")
    (folder / "b.md").write_text(short, "utf-8")
    ingest = ("ingest", folder, "--model", made / "model", "--store", tmp_path / "store", *PREFIX)
    done = kvtool(*ingest, "--chunk-tokens", "2047", "--system", "Answer in a sentence. " * 16, "--json")
    assert done.code == 3
    assert "failed: " in done.err
    assert (done.json["documents"]["added"], done.json["chunks"]["computed"]) == (1, 1)
    row = kvtool("query", FIRST, "--store", tmp_path / "store", "--documents", "b.md", "--fusion", "reuse", "--json")
    assert statuses(row.fine().json) == ["exact"]


def test_a_served_model_is_run_in_turns(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingest beside answers takes the model's turn for each chunk, for the beginning and for the gate."""
    turns, now = [], []

    @contextmanager
    def turn(self: Turns) -> Iterator[None]:
        turns.append(self)
        now.append(self)
        yield
        now.pop()

    def held(*names: Any) -> None:
        for kind, name in names:
            plain = getattr(kind, name)

            def only(*args: Any, plain: Any = plain, **more: Any) -> Any:
                assert now
                return plain(*args, **more)

            monkeypatch.setattr(kind, name, only)

    monkeypatch.setattr(Turns, "turn", turn)
    held((AloneMaker, "chunk"), (AloneMaker, "beginning"))
    ingest = ("ingest", made / "corpus" / "mill2.md", "--model", made / "model", "--store", tmp_path / "store", *ALONE)
    computed = kvtool(*ingest, "--json").fine().json["chunks"]["computed"]
    assert len(turns) == computed + 2


def alone_of(store: Path, chunk: str) -> bytes:
    with Store.open(store) as opened:
        return next(
            stretch
            for stretch, info in opened.stretches().items()
            if info.alone and info.chunks == (bytes.fromhex(chunk),)
        )


@pytest.mark.parametrize("kind", [b"", b"\0", b"\1"])
def test_a_flipped_bit_is_found_and_the_chunk_computed(kind: bytes, store: Path) -> None:
    whole = ask(store, SECOND).json
    stretch = alone_of(store, whole["chunks"][1]["id"])
    flip(store, next(key for key in keys_of(store) if key[:20] == stretch and key[20:21] == kind))
    with Store.open(store) as opened:
        assert "(in stretches)" in verify(opened)[0].reason
    damaged = ask(store, SECOND)
    assert statuses(damaged.json)[1] == "miss"
    assert "was computed in place" in damaged.err
    healed = ask(store, SECOND).json
    assert (statuses(healed), healed["answer"]) == (statuses(whole), whole["answer"])
    with Store.open(store) as opened:
        assert verify(opened) == []


def test_prune_takes_them_and_a_question_makes_them_again(store: Path) -> None:
    whole = ask(store).json
    kvtool("store", "pin", "mill3.md", "--store", store).fine()
    emptied(store)
    left = stretches(store)["alone"]
    assert 0 < left == stretches(store)["count"]  # of what is pinned
    assert statuses(ask(store).json) == ["miss"] * len(whole["chunks"])
    again = ask(store).json
    assert (statuses(again), again["answer"]) == (statuses(whole), whole["answer"])
    assert stretches(store)["alone"] == left + len(whole["chunks"])
    kvtool("store", "forget", "mill2.md", "--store", store).fine()
    assert stretches(store)["alone"] == left


def test_states_of_prompts_do_not_drive_them_out(store: Path) -> None:
    alone = stretches(store)["alone"]
    for number in range(2, 5):
        kvtool("query", FIRST, "--store", store, "--documents", f"mill{number}.md", *SHORT, "--keep-states", "1kB")
    assert stretches(store)["alone"] == alone


def test_a_pack_carries_them(store: Path, tmp_path: Path) -> None:
    whole = ask(store).json
    kvtool("store", "export", tmp_path / "packed.kvpack", "--store", store).fine()
    kvtool("store", "import", tmp_path / "packed.kvpack", "--store", tmp_path / "there", "--mine").fine()
    there = ask(tmp_path / "there").json
    assert (statuses(there), there["answer"]) == (statuses(whole), whole["answer"])


def test_a_shared_store_has_no_states_and_says_so(made: Path, store: Path, tmp_path: Path) -> None:
    url, there = f"file://{tmp_path / 'shared'}", tmp_path / "there"
    alone = stretches(store)["alone"]
    pushed = kvtool("store", "push", url, "--store", store).fine()
    assert f"{alone} chunks computed alone and 1 stretch of prompts stay here" in pushed.err
    assert "`kvtool store export`" in pushed.err
    assert "a shared store holds no states" in kvtool("store", "pull", url, "--store", there).fine().err
    assert {*statuses(ask(there).json)} == {"miss"}
    assert "miss" not in statuses(ask(there).json)
    assert "states" not in kvtool("store", "pull", url, "--store", there).fine().err
