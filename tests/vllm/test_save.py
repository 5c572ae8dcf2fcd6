"""Chunks that vLLM computes are read from its paged cache, and stored as kvtool's own records are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest import engine_storer
from kvtool.core.ingest.engine_storer import served
from kvtool.core.model.tokens import encode
from kvtool.core.records.spool import SaveWish, Spool
from kvtool.core.session.identity import known_result, store_identity
from kvtool.vllm.save import Save, SaveQueue, Saver
from kvtool.vllm.worker import Feeder
from tests.cli.working import CHUNKS, PREFIX, Done, damages, kvtool, listing, write_corpus
from tests.families import SHAPE, tiny_model, tiny_tokenizer
from tests.vllm.imitation import BLOCK, Imitation
from tests.vllm.stored import records, sensitivity

BLOCKS = tuple(range(1, 61))
NAME = "0" * 32
WISH = {"save": NAME, "after": 3, "other": [5, 6]}


class Engine:
    """An imitation of a vLLM server with the connector over a store. `most`: requests for chunks before it fails."""

    def __init__(self, model: Imitation, store: Path, tokenizer: Any) -> None:
        self.model, self.store, self.tokenizer = model, store, tokenizer
        self.most, self.with_connector = 999, True
        self.said: list[str] = []
        self.foreign: bytes | None = None  # what is answered to everything
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self._lock, self._saver = threading.Lock(), None

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 2048}]}
        if path == "/tokenize":
            return {"tokens": encode(self.tokenizer, body["prompt"])}
        with self._lock:
            self.most -= len(body["prompt"])
            if self.most < 0:
                raise RuntimeError("the engine died")
            for ids in body["prompt"] if self.with_connector else ():
                self.save(tuple(ids), body["kv_transfer_params"]["kvtool"])
        return {"choices": []}

    def save(self, ids: tuple[int, ...], row: dict[str, Any]) -> None:
        self.model.serve(ids, BLOCKS)
        queue = SaveQueue(BLOCK)
        assert queue.takes(SimpleNamespace(request_id="a", prompt_token_ids=list(ids)), row)
        (wanted,) = queue.due(step(new={"a": 0}, scheduled={"a": len(ids)}), lambda name: BLOCKS)
        if self._saver is None:
            feeder = Feeder({"store": str(self.store)}, 2048, BLOCK, self.warn)
            feeder.model = self.model
            self._saver = Saver(self.store, feeder, BLOCK, self.warn)
        self._saver.save(wanted)

    def start(self, model: Imitation) -> None:
        self.model, self._saver = model, None

    def warn(self, text: str, hint: str) -> None:
        self.said.append(text)


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            try:
                code, row = 200, {} if engine.foreign is not None else engine.answer(self.path, body)
            except RuntimeError as error:
                code, row = 500, {"error": str(error)}
            data = json.dumps(row).encode() if engine.foreign is None else engine.foreign
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    return Handler


def step(new: dict[str, int], scheduled: dict[str, int], cached: dict[str, int] | None = None) -> Any:
    """A step of vLLM: the computed tokens of its new and earlier requests, and how many each is to get."""
    news = [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in new.items()]
    old = SimpleNamespace(req_ids=[*(cached or {})], num_computed_tokens=[*(cached or {}).values()])
    return SimpleNamespace(scheduled_new_reqs=news, scheduled_cached_reqs=old, num_scheduled_tokens=scheduled)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def engine(tiny: Path, place: Path) -> Iterator[Engine]:
    with torch.random.fork_rng(devices=[]):
        found = Engine(Imitation(AutoModelForCausalLM.from_pretrained(tiny)), place, tiny_tokenizer())
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def ingest(tiny: Path, tmp_path: Path) -> Any:
    corpus = write_corpus(tmp_path / "corpus")
    return lambda store, *more: kvtool(
        "ingest", corpus, "--model", tiny, *CHUNKS, *PREFIX, "--json", "--store", store, *more
    )


def by_engine(ingest: Any, place: Path, engine: Engine, *more: str) -> Done:
    done: Done = ingest(place, "--engine", engine.address, *more)
    return done


def test_vllms_records_are_those_that_kvtool_makes(ingest: Any, engine: Engine, place: Path, tmp_path: Path) -> None:
    own = ingest(tmp_path / "own", "--store-dtype", "float32").fine().json
    far = by_engine(ingest, place, engine, "--store-dtype", "float32").fine().json
    assert far["chunks"] == own["chunks"]
    assert far["resolved"]["device"] == "vllm"
    made, expected = records(place), records(tmp_path / "own")
    assert made.keys() == expected.keys()
    for chunk_id, sides in expected.items():
        torch.testing.assert_close(made[chunk_id], sides, atol=1e-4, rtol=0)
    moved, known = sensitivity(place), sensitivity(tmp_path / "own")
    assert moved.keys() == known.keys() != set()
    for chunk_id, distances in known.items():
        torch.testing.assert_close(moved[chunk_id], distances, atol=1e-2, rtol=0)
    assert [*place.glob(".tmp-*")] == []
    assert damages(place) == []
    with Store.open(place) as store:
        identity = store_identity(store)
        found = store.arithmetics([one for one in store.chunk_ids() if one != identity.prefix_id])
        result = known_result(store, identity.fingerprint)
    assert {*found} == {Arithmetic("float32", "vllm")}
    assert result is not None
    assert [check.passed for check in result.checks if "on vllm" in check.name] == [True]


def test_a_lossy_level_is_encoded_here(ingest: Any, engine: Engine, place: Path) -> None:
    by_engine(ingest, place, engine, "--level", "2", "--no-engine-check").fine()
    with Store.open(place) as store:
        prefix = store_identity(store).prefix_id
        assert {tuple(store.levels(one)) for one in store.chunk_ids() if one != prefix} == {("2",)}


@pytest.mark.parametrize("level", ["raw", "2"])
def test_another_model_of_the_same_shape_is_refused_in_every_run(
    level: str, ingest: Any, engine: Engine, place: Path
) -> None:
    right, wrong = engine.model, Imitation(tiny_model("llama", seed=1))
    engine.start(wrong)
    by_engine(ingest, place, engine, "--level", level).failed(12, "differ by", "--model", "--no-engine-check")
    assert listing(place) == []
    engine.start(right)
    by_engine(ingest, place, engine, "--level", level, "--chunk-tokens", "100").fine()
    engine.start(wrong)
    by_engine(ingest, place, engine, "--level", level).failed(12, "differ by")
    assert damages(place) == []


def test_a_model_of_another_shape_is_refused(ingest: Any, engine: Engine, place: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        engine.model = Imitation(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | {"num_hidden_layers": 2})))
    by_engine(ingest, place, engine).failed(12, "bytes of KV a token")
    assert listing(place) == []


def test_a_server_that_dies_leaves_what_is_stored(
    ingest: Any, engine: Engine, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 64})
    engine.most = 8
    by_engine(ingest, place, engine).failed(1, "answers 500", "what is stored stays")
    assert damages(place) == []
    there = len(listing(place))
    assert 0 < there < 6
    engine.most = 999
    assert by_engine(ingest, place, engine).fine().json["documents"]["unchanged"] == there
    assert [*place.glob(".tmp-*")] == []


def test_what_is_no_vllm_with_the_connector_is_refused(ingest: Any, engine: Engine, place: Path) -> None:
    engine.with_connector = False
    by_engine(ingest, place, engine).failed(1, "no connector over this store", "kvtool help vllm")
    ingest(place.with_name("new"), "--engine", "http://127.0.0.1:9").failed(1, "does not answer", "kvtool help vllm")
    assert not place.with_name("new").exists()
    ingest(place, "--engine", "localhost:8000").failed(2, "is no address")
    ingest(place, "--engine", engine.address, "--ray", "local").failed(2, "leave one out")
    ingest(place, "--engine", engine.address, "--lead-in", "neighbour").failed(2, "--lead-in warm")


MODEL = '{"data": [{"id": "m", "max_model_len": %s}]}'
FOREIGN = ['{"data": [{"max_model_len": 4}]}', '{"data": "abc"}', '{"data": [["a"]]}', '{"data": [null]}', "[" * 10**5]
FOREIGN += ['{"data": {"a": 1}}', "[]", "7", "", *(MODEL % wrong for wrong in ('"4"', "-1", "[1]"))]


@pytest.mark.parametrize("body", FOREIGN)
def test_a_server_may_answer_anything(body: str, engine: Engine) -> None:
    engine.foreign = body.encode()
    with pytest.raises(KvtoolError, match="vLLM"):
        served(engine.address)


def test_an_answer_without_end_is_not_read_for_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.foreign = b" " * 4_000_000
    monkeypatch.setattr(engine_storer, "_LONGEST_ANSWER", 1_000_000)
    with pytest.raises(KvtoolError, match="no end"):
        served(engine.address)
    engine.foreign = (MODEL % "64").encode()
    assert served(engine.address) == ("m", 64)
    with pytest.raises(ValueError, match="no end"):  # a byte now and then
        engine_storer._read(cast(Any, SimpleNamespace(read1=lambda most: b" ")), 0.0)


def test_another_tokenizer_is_refused(
    ingest: Any, engine: Engine, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine, "answer", lambda path, body: {"tokens": [1], "data": [{"id": "x", "max_model_len": 99}]}
    )
    by_engine(ingest, place, engine).failed(12, "tokenizer is another one")


def test_a_request_is_saved_when_its_last_prompt_token_is_computed() -> None:
    queue = SaveQueue(BLOCK)
    ids = list(range(40))
    for name in "abc":
        assert queue.takes(SimpleNamespace(request_id=name, prompt_token_ids=ids), WISH)

    def blocks_of(name: str) -> Sequence[int]:
        return (7, 8, 9, 10)

    assert queue.due(step({"a": 0, "b": 16}, {"a": 30, "b": 10}), blocks_of) == []
    (one,) = queue.due(step({"c": 32}, {"a": 5, "c": 8}, {"a": 30}), blocks_of)
    assert (one.ids, one.blocks) == (tuple(ids), (7, 8, 9))
    assert queue.due(step({}, {"b": 16}, {"b": 0}), blocks_of) == []
    assert len(queue.due(step({}, {"a": 5, "b": 24}, {"a": 35, "b": 16}), blocks_of)) == 2
    assert queue.due(step({}, {"a": 1}, {"a": 40}), blocks_of) == []


@pytest.mark.parametrize(
    "wrong",
    [{"save": "../x"}, {"save": NAME[1:]}, {"after": "1"}, {"after": -1}, {"other": [None]}, {"other": 3}],
    ids=str,
)
def test_a_wish_that_is_not_one_is_left_to_others(wrong: dict[str, Any]) -> None:
    assert SaveWish.of(WISH) is not None
    assert SaveWish.of(WISH | wrong) is None
    assert [SaveWish.of(row) for row in (None, True, "epic", {"fusion": "epic"}, {"save": NAME})] == [None] * 5


def test_nothing_is_written_where_no_ingest_waits(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    saver = Saver(tmp_path, None, BLOCK, lambda text, hint: said.append(text))  # type: ignore[arg-type]
    saver.save(Save((1, 2, 3, 4), SaveWish(NAME, 3, None), (1,)))
    assert len(said) == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("count", "why"), [(1, "longer than the model's window"), (2, "tensor-parallel ranks")])
def test_a_chunk_that_cannot_be_read_says_why(count: int, why: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    ranks = SimpleNamespace(count=count, number=0)
    feeder: Any = SimpleNamespace(session=SimpleNamespace(decoder=None), ranks=ranks)
    saver = Saver(tmp_path, feeder, BLOCK, lambda *said: None)
    saver.save(Save((1, 2, 3, 4), SaveWish(spool.name, 3, None), (0,)))
    with pytest.raises(Exception, match=why):
        spool.take((4,))
