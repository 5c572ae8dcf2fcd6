"""`kvtool.open()`: its replies, its warnings, several threads, and a store that others change meanwhile."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.api import Cache
from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import KvtoolError, ModelError, StoreFormatError, UsageError
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.query import answer as answering
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request, read_batch
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, QUESTION, SEEN, break_record, chunks_of, kvtool, listing
from tests.wording import refused

NEW = "# The windmill\n\nThe windmill on the hill was built by Zacharias in 1888. It pumps water."
OPTIONS = QueryOptions(max_tokens=4, top_k=3)


@pytest.fixture
def own(corpus: Path, store: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    ingest(folder, store)
    kvtool("ingest", corpus, "--store", store).fine()  # the first one stays known
    with Store.open(store) as opened, opened.writer() as writer:
        for name in corpus.iterdir():
            writer.remove_file(str(name))
    return folder


@pytest.fixture
def cache(store: Path) -> Iterator[Cache]:
    with package.open(store) as opened:
        opened.query(SEEN[0], fusion="auto", max_tokens=1)  # the machine is measured, the gate has run
        yield opened


def ingest(corpus: Path, store: Path) -> None:
    kvtool("ingest", corpus, "--store", store, "--sync", *CHUNKS).fine()


def facts(reply: Reply) -> tuple[object, ...]:
    chunks = [(chunk.id, chunk.source, chunk.start, chunk.line, chunk.status) for chunk in reply.chunks]
    return reply.answer, chunks, reply.tokens, reply.fused.logits.tolist()


def sources(reply: Reply) -> set[str]:
    return {Path(chunk.source).name for chunk in reply.chunks}


@pytest.mark.slow
def test_new_changed_and_removed_documents(cache: Cache, own: Path, store: Path) -> None:
    question = "Who built the windmill on the hill?"
    before = cache.query(question, max_tokens=1)
    assert "new.md" not in sources(before)

    (own / "new.md").write_text(NEW)
    ingest(own, store)
    found = cache.query(question, max_tokens=1)
    assert "new.md" in sources(found)
    assert found.revision > before.revision

    (own / "new.md").write_text("A line before.\n\n" * 3 + NEW.replace("Zacharias", "Leopold"))
    ingest(own, store)
    changed = cache.query(question, documents=["new.md"], max_tokens=1)
    text = (own / "new.md").read_text()
    first = changed.chunks[0]
    assert text[first.start : first.end].startswith("A line before.")
    assert changed.fused.tokens.fresh < len(changed.fused.plan.ids)
    tokenizer = cache._session.tokenizer  # type: ignore[union-attr]
    assert "Leopold" in tokenizer.decode(list(changed.fused.plan.ids))

    (own / "new.md").unlink()
    ingest(own, store)
    assert "new.md" not in sources(cache.query(question, max_tokens=1))
    with refused(UsageError):
        cache.query(question, documents=["new.md"])
    with package.open(store) as idle:
        assert facts(cache.query(question, max_tokens=4)) == facts(idle.query(question, max_tokens=4))


def remove_all(store: Path) -> None:
    with Store.open(store) as other, other.writer() as writer:
        for entry in list(other.files()):
            writer.remove_file(entry.path)
        writer.drop_chunks(other.chunk_ids())


def compact_it(store: Path) -> None:
    with Store.open(store) as other, other.writer() as writer:
        writer.compact()


@pytest.mark.slow
@pytest.mark.parametrize("change", [remove_all, compact_it, lambda store: (remove_all(store), compact_it(store))])
@pytest.mark.parametrize("mode", ["union", "auto"])
def test_a_store_that_changes_in_the_middle_of_a_question(
    session: Session, store: Path, mode: str, change: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the prompt was laid out and before anything is read."""
    told: list[str] = []
    session = replace(session, warn=lambda text, hint: told.append(text))
    options = replace(OPTIONS, fusion=mode)
    expected = answer(session, Request("Who built the third mill?"), options)
    lay_out = answering.lay_out

    def laid_out(*args: Any, **more: Any) -> Any:
        asked = lay_out(*args, **more)
        thread = threading.Thread(target=change, args=(store,))
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "a writer waits for a reader"
        return asked

    monkeypatch.setattr(answering, "lay_out", laid_out)
    reply = answer(session, Request("Who built the third mill?"), options)
    assert facts(reply) == facts(expected)
    assert reply.revision == expected.revision
    assert told == []


def compressed(store: Path, prompts: int) -> None:
    compress(store, CompressOptions(levels=("4",), fit=True, fit_prompts=prompts, questions=0))


@pytest.mark.slow
def test_a_level_that_was_made_anew_is_not_answered_from_memory(store: Path) -> None:
    compressed(store, 1)
    options = replace(OPTIONS, level="4", fusion="reuse")
    with Store.open(store) as opened, Store.open(store) as other:
        session = Session.open(opened, memory_cache=2**30)
        before = answer(session, Request("third mill"), options)
        with other.writer() as writer:
            writer.drop_level(other.chunk_ids(), "4")
        compressed(store, 3)
        after = answer(session, Request("third mill"), options)
        assert after.revision > before.revision
        assert facts(after) == facts(answer(Session.open(other), Request("third mill"), options))
        assert after.fused.logits.tolist() != before.fused.logits.tolist()


def test_a_store_of_another_model_is_refused(session: Session, store: Path) -> None:
    with Store.open(store) as other, other.writer() as writer:
        manifest = other.manifest()
        writer.set_manifest(manifest | {"identity": manifest["identity"] | {"fingerprint": "another"}})
    with refused(ModelError):
        answer(session, Request("mill"), OPTIONS)


@pytest.mark.slow
def test_a_store_with_another_instruction_is_followed(session: Session, store: Path) -> None:
    answer(session, Request("mill"), OPTIONS)
    with Store.open(store) as other, other.writer() as writer:
        manifest = other.manifest()
        header = [*manifest["identity"]["answer_header"], 7]
        writer.set_manifest(manifest | {"identity": manifest["identity"] | {"answer_header": header}})
    reply = answer(session, Request("mill"), OPTIONS)
    assert reply.fused.plan.ids[-1] == 7


def test_another_store_in_its_place_is_noticed(session: Session, store: Path, built: Path) -> None:
    shutil.rmtree(store)
    shutil.copytree(built / "store", store)
    with refused(StoreFormatError):
        answer(session, Request("mill"), OPTIONS)


def test_nothing_is_written_under_a_view(store: Path) -> None:
    with Store.open(store) as opened:
        with opened.view():
            with refused(KvtoolError), opened.writer():
                pass
            opened.end_view()
            with opened.writer():
                pass
        assert opened._view is None


@pytest.fixture
def reply(store: Path) -> Reply:
    with package.open(store) as cache:
        return cache.query("Where does the first mill stand?", top_k=3, max_tokens=4)


def test_chunks_carry_their_text(reply: Reply) -> None:
    for chunk in reply.chunks:
        assert chunk.text == Path(chunk.source).read_text("utf-8")[chunk.start : chunk.end]
        assert chunk.text.strip()
        assert chunk.to_json()["text"] == chunk.text


def test_options_that_were_made_before_are_asked_with(store: Path) -> None:
    options = package.QueryOptions(fusion="epic", max_tokens=3)
    with package.open(store) as cache:
        asked = cache.query("Where does the first mill stand?", **vars(options))
        assert asked.fusion == "epic"
        assert asked.tokens["generated"] <= 3
        with refused(package.KvtoolError):
            cache.query("Where?", **vars(package.QueryOptions(offline=True)))


def test_a_store_is_searched_and_listed_without_a_model(store: Path) -> None:
    with package.open(store) as opened:
        report, documents, stats = opened.search(QUESTION, top_k=2), opened.documents(), opened.stats()
        assert opened._session is None
    by_command = kvtool("search", QUESTION, "--top-k", 2, "--store", store, "--json").fine().json
    assert {"schema": by_command["schema"], **report.to_json()} == by_command
    assert documents == listing(store)
    assert stats["documents"] == len(documents)


def test_a_line_may_hold_any_separator_that_json_allows(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "one\u2028two\x85three"}\r\n\n{"question": "b"}\n', "utf-8")
    assert [one.question for one in read_batch(tmp_path / "q.jsonl")] == ["one\u2028two\x85three", "b"]


ASKED = [(f"Who built the {which} mill?", mode) for which in SEEN[:3] for mode in FUSIONS]


@pytest.mark.slow
def test_a_pool_of_threads_answers_as_one_thread_does(cache: Cache) -> None:
    def ask(one: tuple[str, str]) -> tuple[object, ...]:
        return facts(cache.query(one[0], fusion=one[1], max_tokens=4, top_k=3))

    serial = [ask(one) for one in ASKED]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ASKED)) == serial


@pytest.mark.slow
def test_threads_ingest_while_others_ask(cache: Cache, corpus: Path) -> None:
    def ask(number: int) -> str:
        if number % 4 == 3:
            cache.ingest([corpus])
        return cache.query(ASKED[0][0], max_tokens=4).answer

    expected = ask(0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(8))) == {expected}


def test_a_python_user_is_warned(store: Path) -> None:
    break_record(store, chunks_of(store, "mill0.md")[0], 1)
    with package.open(store) as opened, refused(package.KvtoolWarning) as told:
        opened.query("first mill", documents=["mill0.md"], max_tokens=1)
    assert {one.filename for one in told} == {__file__}
