"""Questions to a model that keeps states: what is stored of a prompt, found again, dropped, damaged and refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache import tables
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.side_files import Served, read_served
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import Place, Row, StretchInfo, info_row, part_row
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.prefix_cache import decode_part, encode_part, named_states
from kvtool.core.model.decoder import Decoder
from tests.cli.working import CHUNKS, SHORT, Done, damages, emptied, flip_row, kvtool, write_corpus
from tests.families import save_tiny, tiny_model
from tests.fusion.making import decoder_of, tokens

FIRST, SECOND = "Who built the third mill?", "When was the second mill finished, and for whom?"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3-next", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="session")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_corpus(folder / "corpus")
    exactly = ("--store-dtype", "float32")  # what is stored is what was computed
    kvtool("ingest", folder / "corpus", "--model", model, "--store", folder / "store", *CHUNKS, *exactly).fine()
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def ask(store: Path, question: str, *more: object, documents: str = "mill2.md") -> Done:
    return kvtool("query", question, "--store", store, "--documents", documents, *SHORT, "--json", *more).fine()


def told(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["answer"], row["tokens"]["reused"], row["tokens"]["fresh"]


def stretches(store: Path) -> dict[str, int]:
    with Store.open(store) as opened:
        return dict(opened.stats()["checkpoints"])


def keys_of(store: Path) -> list[bytes]:
    with Store.open(store) as opened, opened.snapshot() as snapshot:
        return list(snapshot.keys(tables.STRETCHES))


def test_ingest_computes_nothing(made: Path, model: Path, tmp_path: Path) -> None:
    done = kvtool("ingest", made / "corpus", "--model", model, "--store", tmp_path / "new", *CHUNKS, "--json").fine()
    assert "keeps a recurrent state" in done.err
    row = done.json
    assert (row["chunks"]["computed"], row["tokens"], row["kv_bytes"]) == (0, 0, 0)
    assert row["documents"]["added"] > 0
    again = kvtool("ingest", made / "corpus", "--store", tmp_path / "new", "--json").fine()
    assert "recurrent" not in again.err  # it was said
    assert again.json["documents"]["unchanged"] == row["documents"]["added"]
    for lead_in in ("neighbour", "warm"):
        kvtool("ingest", made / "corpus", "--store", tmp_path / "new", "--lead-in", lead_in).failed(2, "lead-in")
    kvtool("ingest", made / "corpus", "--store", tmp_path / "new", "--lead-in", "none").fine()
    with Store.open(tmp_path / "new") as opened:
        assert verify(opened) == []
        assert all(opened.has_chunk(chunk) and not opened.levels(chunk) for chunk in opened.chunk_ids())


def test_the_second_question_computes_itself_alone(store: Path) -> None:
    first, full = ask(store, FIRST).json, ask(store, SECOND, "--fusion", "full").json
    assert first["fusion"] == "prefix"
    assert first["tokens"]["reused"] == first["bytes_read"] == 0
    second = ask(store, SECOND, "--token-ids").json
    assert second["answer"] == full["answer"]
    assert second["tokens"]["fresh"] == len(second["segments"]["question"])
    assert second["tokens"]["prompt"] == full["tokens"]["prompt"]
    assert {chunk["status"] for chunk in second["chunks"]} == {"exact"}
    assert second["bytes_read"] > 0
    assert full["tokens"]["reused"] == 0
    assert damages(store) == []
    before = keys_of(store)
    assert told(ask(store, SECOND).json) == told(second)
    assert keys_of(store) == before  # a question is not kept


def test_compared_with_full_it_is_the_same(store: Path) -> None:
    ask(store, FIRST)
    asked = ("query", SECOND, "--store", store, "--documents", "mill2.md", *SHORT)
    runs = kvtool(*asked, "--compare", "prefix", "--json").fine()
    full, prefix = runs.json["runs"]
    assert prefix["tokens"]["reused"] > 0
    assert prefix["answer_equal"]
    assert abs(prefix["kl_answer"]) < 1e-6
    assert full["fusion"] == "full"


def test_modes_are_refused_before_the_model_is_loaded(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.checkpoint.load.load_model", None)
    asked = ("query", FIRST, "--store", store, "--documents", "mill2.md")
    for mode in ("reuse", "epic", "blend", "union", "infoflow", "auto"):
        kvtool(*asked, "--fusion", mode).failed(2, "recurrent state", "`--fusion prefix` or `--fusion full`")
    kvtool(*asked, "--compare", "prefix,reuse").failed(2, "--fusion reuse")


def test_what_else_is_refused(store: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"question": "Who?", "answers": ["He"]}', "utf-8")
    kvtool("eval", batch, "--store", store).failed(2, "recurrent state", "that would need")
    kvtool("query", FIRST, "--store", store, "--defer").failed(2, "--defer")
    for words in (("compress",), ("inspect", "plan", FIRST), ("inspect", "deviation", FIRST)):
        kvtool(*words, "--store", store).failed(2, "recurrent state", "that would need", "--fusion prefix")


@pytest.mark.slow
def test_a_model_that_does_not_go_on_from_a_state_is_found_out(made: Path, tmp_path: Path) -> None:
    folder = save_tiny("jamba", tmp_path / "jamba")
    kvtool("ingest", made / "corpus", "--model", folder, "--store", tmp_path / "store", *CHUNKS).fine()
    asked = ("query", FIRST, "--store", tmp_path / "store", "--documents", "mill2.md", *SHORT)
    kvtool(*asked).failed(12, "the gate refuses this model", "after a stored beginning", "--fusion full")
    kvtool(*asked, "--fusion", "full").fine()


@pytest.mark.slow
def test_nothing_is_kept_where_nothing_may(store: Path) -> None:
    assert "could not be stored" in ask(store, FIRST, "--set", "load.state_cache_size=10kB").err
    ask(store, FIRST, "--set", "load.state_cache_size=0")
    assert stretches(store)["count"] == 0
    assert ask(store, SECOND).json["tokens"]["reused"] == 0


@pytest.mark.slow
def test_what_was_not_used_for_longest_goes_for_what_is_new(store: Path) -> None:
    ask(store, FIRST)
    one = stretches(store)["bytes"]
    ask(store, FIRST, documents="mill3.md")
    both = stretches(store)["bytes"]
    assert both > one
    limit = str(int((both + one) / 2))
    ask(store, FIRST, "--set", f"load.state_cache_size={limit}", documents="mill4.md")
    assert stretches(store)["bytes"] < both + one - 1000
    beginning = ask(store, SECOND, documents="mill5.md").json["tokens"]["reused"]
    assert beginning > 0  # which is used by all
    assert ask(store, SECOND, documents="mill4.md").json["tokens"]["reused"] > beginning
    assert damages(store) == []


def test_a_store_that_cannot_be_written_answers(store: Path) -> None:
    ask(store, FIRST)
    before = keys_of(store)
    with Store.open(store) as opened, opened.writer():
        done = ask(store, SECOND, documents="mill3.md")
    assert "could not be stored" in done.err
    assert keys_of(store) == before


@pytest.mark.slow
def test_forgetting_a_document_takes_its_stretches(store: Path) -> None:
    ask(store, FIRST)
    ask(store, FIRST, documents="mill3.md")
    kvtool("store", "rm", "mill2.md", "--store", store).fine()
    assert ask(store, SECOND, documents="mill3.md").json["tokens"]["reused"] > 0
    with Store.open(store) as opened:
        chunks = {*opened.chunk_ids()}
        assert all(chunks.issuperset(info.chunks) for info in opened.stretches().values())
        assert verify(opened) == []


@pytest.mark.slow
def test_a_changed_document_is_computed_from_where_it_changed(made: Path, store: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "corpus", tmp_path / "corpus")
    kvtool("ingest", tmp_path / "corpus", "--store", store, *CHUNKS).fine()
    path = tmp_path / "corpus" / "mill2.md"
    path.write_text("\n\n".join(f"Part {number} of the second mill. " + "It was of oak. " * 30 for number in range(6)))
    kvtool("ingest", tmp_path / "corpus", "--store", store, *CHUNKS).fine()
    whole = ask(store, FIRST, documents=str(path)).json
    path.write_text(path.read_text().replace("Part 4", "Quarter 4"))
    kvtool("ingest", tmp_path / "corpus", "--store", store, *CHUNKS).fine()
    changed = ask(store, FIRST, documents=str(path)).json
    assert 0 < changed["tokens"]["reused"] < whole["tokens"]["prompt"]
    assert [chunk["status"] for chunk in changed["chunks"]][:1] == ["exact"]
    assert changed["answer"] == ask(store, FIRST, "--fusion", "full", documents=str(path)).json["answer"]


def test_prune_takes_stretches_first(store: Path) -> None:
    ask(store, FIRST)
    assert stretches(store)["count"] > 0
    row = emptied(store).json
    assert row["steps"][0]["step"] == "checkpoints"
    assert row["steps"][0]["checkpoints"] > 0
    assert stretches(store) == {"count": 0, "bytes": 0}
    assert ask(store, SECOND).json["tokens"]["reused"] == 0


def each_kind(store: Path) -> Iterator[bytes]:
    """A description, rows and a state, of the last stretch of the prompt."""
    with Store.open(store) as opened:
        last = max(opened.stretches().items(), key=lambda one: one[1].start)[0]
    by_kind = {key[20:21]: key for key in keys_of(store) if key[:20] == last}
    assert set(by_kind) == {b"", b"\0", b"\1"}
    yield from by_kind.values()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_damaged_row_is_found_out_and_computed_again(kind: int, store: Path) -> None:
    ask(store, FIRST)
    whole = ask(store, SECOND).json
    flip_row(store, tables.STRETCHES, list(each_kind(store))[kind])
    with Store.open(store) as opened:
        (damage, *_) = verify(opened)
        assert "(in checkpoints)" in damage.reason
    done = ask(store, SECOND)
    damaged = done.json
    assert ("is damaged, and was computed again" in done.err) == bool(kind)  # without its description it is not stored
    assert damaged["answer"] == whole["answer"]
    assert damaged["tokens"]["reused"] < whole["tokens"]["reused"]
    assert told(ask(store, SECOND).json) == told(whole)  # it was stored anew
    assert damages(store) == []


def test_a_missing_part_is_damage(store: Path) -> None:
    ask(store, FIRST)
    key = list(each_kind(store))[1]
    with Store.open(store) as opened:
        opened.environment.write(lambda transaction: transaction.delete(tables.STRETCHES + key), 0)
        (damage,) = verify(opened)
    assert "missing" in damage.reason
    ask(store, SECOND)
    assert damages(store) == []


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_found(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state checkpoint whose parts came in several transactions."""
    monkeypatch.setattr("kvtool.core.cache.writer.BATCH_BYTES", 1)
    ask(store, FIRST)  # one transaction a part
    whole = keys_of(store)
    put, seen = Writer.commit, []

    def killed(writer: Writer, rows: Any, *more: Any, **others: Any) -> None:
        seen.append(rows)
        if len(seen) == 5:
            raise KeyboardInterrupt
        put(writer, rows, *more, **others)

    monkeypatch.setattr(Writer, "commit", killed)
    code = kvtool("query", FIRST, "--store", store, "--documents", "mill3.md", *SHORT).code
    assert code == 130
    monkeypatch.setattr(Writer, "commit", put)
    assert len(keys_of(store)) > len(whole)
    with Store.open(store) as opened:
        assert verify(opened) == []
        found = {*opened.stretches()}
    assert {key[:20] for key in whole} < found < {key[:20] for key in keys_of(store)}
    ask(store, FIRST, documents="mill4.md")
    with Store.open(store) as opened:  # what was left was removed by the next write
        described = {*opened.stretches()}
    assert {key[:20] for key in keys_of(store)} == described


@pytest.mark.slow
def test_stretches_are_packed_with_their_documents(store: Path, tmp_path: Path) -> None:
    whole = ask(store, FIRST).json
    ask(store, FIRST, documents="mill3.md")
    ask(store, FIRST, "--system", "Answer in one word, which nobody else is to read.")
    place, taken = tmp_path / "one.kvpack", tmp_path / "taken"
    report = kvtool("store", "export", place, "--only", "mill2.md", "--store", store, "--json").fine().json
    kvtool("store", "import", place, "--store", taken, "--mine").fine()
    with Store.open(taken) as opened:
        assert report["checkpoints"] == len(opened.stretches()) == len(whole["chunks"]) + 1
        assert all(info.own for info in opened.stretches().values())
        assert verify(opened) == []
    second = ask(taken, SECOND).json
    assert {chunk["status"] for chunk in second["chunks"]} == {"exact"}


@pytest.mark.slow
def test_documents_are_shared_without_stretches(store: Path, tmp_path: Path) -> None:
    ask(store, FIRST)
    tier = f"file://{tmp_path / 'tier'}"
    pushed = kvtool("store", "push", tier, "--store", store).fine()
    assert f"{stretches(store)['count']} state checkpoints of prompts stay here" in pushed.err
    assert "`kvtool store export`" in pushed.err
    pulled = tmp_path / "pulled"
    assert "a shared store holds no states" in kvtool("store", "pull", tier, "--store", pulled).fine().err
    assert ask(pulled, SECOND).json["tokens"]["reused"] == 0
    assert ask(pulled, FIRST).json["tokens"]["reused"] > 0
    assert damages(pulled) == []


def test_what_a_question_found_is_counted(store: Path) -> None:
    ask(store, FIRST)
    ask(store, SECOND)
    with Store.open(store) as opened:
        named = [document for document in opened.documents() if "mill2" in document.source]
        chunks = [ref.chunk_id for document in named for ref in document.chunks]
        assert read_served(opened.path) == Served(2, len(chunks), len(chunks))
        assert opened.last_used().keys() == {*chunks} | {*opened.stretches()}


# ---- wrong data under a right digest: detected, and computed again ----

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(tiny_model("qwen3.5"))


def states_of(decoder: Decoder) -> Tensors:
    _, cache = decoder.prefill(tokens(9, 1))
    return {f"{what} {number}": state for (what, number), state in cache.buffers[0].states().items()}


def at(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda states: states | {name: change(states[name])}


WRONG: dict[str, Callable[[Tensors], Tensors]] = {
    "a name without a number": lambda states: states | {"recurrent": states["recurrent 0"]},
    "a number that is none": lambda states: states | {"recurrent x": states["recurrent 0"]},
    "a state too many": lambda states: states | {"recurrent 1": states["recurrent 0"]},
    "no window": lambda states: {name: state for name, state in states.items() if name != "conv 0"},
    "no recurrence": lambda states: {name: state for name, state in states.items() if name != "recurrent 0"},
    "nothing": lambda states: {},
    "a longer window": at("conv 0", lambda state: torch.cat([state, state], -1)),
    "a window of fewer channels": at("conv 0", lambda state: state[:, 1:]),
    "a flat window": at("conv 0", torch.Tensor.flatten),
    "a head too few": at("recurrent 0", lambda state: state[:, 1:]),
    "one number for all": at("recurrent 0", lambda state: state[:, :1, :1, :1]),
    "two prompts": at("recurrent 0", lambda state: torch.cat([state, state])),
    "what a separate chunk carries": lambda states: states | {"carried 0": states["recurrent 0"]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_states_that_are_no_layers(wrong: str, decoder: Decoder) -> None:
    sound = states_of(decoder)
    assert len(named_states(sound, decoder, 0)) == 2
    with pytest.raises(DamagedError):
        named_states(WRONG[wrong](sound), decoder, 0)


@pytest.fixture
def answered(store: Path) -> Path:
    """A store that has answered a question about the same document."""
    ask(store, FIRST)
    return store


def stretch_in(store: Path) -> tuple[bytes, StretchInfo]:
    with Store.open(store) as opened:
        found = opened.stretches()
    return max(((one, info) for one, info in found.items() if info.states), key=lambda pair: pair[1].start)


def put(store: Path, row: Row) -> None:
    table, key, value = row
    with Store.open(store) as opened:
        opened.environment.write(lambda transaction: transaction.put(table + key, value), 0)


def parts_of(store: Path, stretch: bytes, place: Place) -> Tensors:
    with Store.open(store) as opened:
        return {name: one.clone() for name, one in decode_part(opened.read_part(stretch, place)).items()}


def spoiled(parts: Tensors, number: float) -> Tensors:
    """The same with one number of each tensor in place of what it was."""
    for one in parts.values():
        one.view(-1)[0] = number
    return parts


PAYLOADS: dict[str, Callable[[Tensors], bytes]] = {
    "cut short": lambda states: encode_part(states)[:-64],
    "empty": lambda states: b"",
    "other sizes": lambda states: encode_part({name: state[:, 1:] for name, state in states.items()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_state_of_another_make_is_computed_again(payload: str, answered: Path) -> None:
    whole = ask(answered, SECOND).json
    stretch, info = stretch_in(answered)
    layer = info.states[-1]
    wrong = PAYLOADS[payload](parts_of(answered, stretch, ("state", layer)))
    put(answered, part_row(stretch, ("state", layer), wrong))
    done = ask(answered, SECOND)
    assert "damaged" in done.err
    assert "miss" in [chunk["status"] for chunk in done.json["chunks"]]
    assert done.json["answer"] == whole["answer"]
    again = ask(answered, SECOND)
    assert "damaged" not in again.err  # it was stored anew
    assert [again.json[name] for name in ("answer", "chunks")] == [whole[name] for name in ("answer", "chunks")]


LAYERS: dict[str, Callable[[StretchInfo], StretchInfo]] = {
    "a layer too few": lambda info: replace(info, states=info.states[:-1]),
    "a layer too many": lambda info: replace(info, states=(*info.states, 9)),
    "no rows": lambda info: replace(info, rows=()),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_stretch_of_another_layer_count_is_computed_again(layers: str, answered: Path) -> None:
    whole = ask(answered, SECOND).json
    stretch, info = stretch_in(answered)
    put(answered, info_row(stretch, LAYERS[layers](info)))
    done = ask(answered, SECOND)
    assert "miss" in [chunk["status"] for chunk in done.json["chunks"]]
    assert done.json["answer"] == whole["answer"]
    assert ask(answered, SECOND).json["answer"] == whole["answer"]
    assert damages(answered) == []


def test_a_layer_that_no_key_has_room_for_is_damage(answered: Path, tmp_path: Path) -> None:
    stretch, info = stretch_in(answered)
    text = info.to_bytes().replace(b'"states":[0', b'"states":[70000')
    broken = info_row(stretch, info)
    put(answered, (tables.STRETCHES, broken[1], seal(stretch, Kind.STRETCH, text)))
    verified = kvtool("store", "verify", "--store", answered)
    assert verified.code == 13
    assert "Traceback" not in verified.err
    kvtool("store", "export", tmp_path / "one.kvpack", "--store", answered).fine()
    kvtool("store", "verify", "--repair", "--store", answered)
    assert damages(answered) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["state", "rows"])
def test_no_answer_is_made_of_what_is_no_number(side: str, number: float, answered: Path) -> None:
    """Its digest is right. A state is looked at and computed again; rows are not, and what they make is refused."""
    whole = ask(answered, SECOND).json
    stretch, info = stretch_in(answered)
    for place in info.places:
        if place[0] == side:
            put(answered, part_row(stretch, place, encode_part(spoiled(parts_of(answered, stretch, place), number))))
    again = kvtool("query", SECOND, "--store", answered, "--documents", "mill2.md", *SHORT, "--json")
    if side == "state":
        assert again.fine().json["answer"] == whole["answer"]
    else:
        again.failed(12, "no finite numbers")
    ask(answered, SECOND, "--fusion", "full")
    assert damages(answered) == []
