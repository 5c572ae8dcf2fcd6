"""Size, error, loss and speed of serdes for LMCache, on the KV of texts.

    python samples/benchmarks/lmcache_serde.py STORE TEXT… [--tokens 1024] [--scored 128]

Prefills each text with the store's model, encodes the KV of its first tokens in chunks of 256 by each serde, and
compares the next tokens' distributions with those of exact KV: KL in nats a token, of all chunks and of the first and
the last one alone, with the others exact. `not un-rotated` treats rotated keys as if they were not. With the package
lmcache its own CacheGen is measured, too: on a CPU by its fallback, with its bins for any model of ten or more layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.load import load_model
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import Profile
from kvtool.core.model.tokens import encode
from kvtool.core.session.session import Session
from kvtool.lmcache import LevelSerde, Rope

CHUNK = 256
KV = torch.Tensor  # bfloat16 [2, layers, tokens, channels]


@dataclass(frozen=True)
class Serde:
    """Bytes of a chunk and back."""

    name: str
    encode: Callable[[KV], tuple[Any, int]]  # what `decode` needs, and bytes
    decode: Callable[[Any], KV]


class Unmoved(Rope):
    """Leaves keys as they are."""

    def multiplied(self, keys: KV, turns: KV) -> KV:
        return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=128)
    given = parser.parse_args()
    with Store.open(given.store) as store:
        session = Session.open(store)
        profile, tokenizer = session.profiles.current(), session.tokenizer
        loaded = load_model(session.model.files, dtype="bfloat16", arithmetic="float32")
    assert profile is not None
    torch.set_grad_enabled(False)
    prompts = []
    for path in given.texts:
        ids = encode(tokenizer, path.read_text(encoding="utf-8"))
        assert len(ids) >= given.tokens + given.scored, f"{path} has {len(ids)} tokens"
        prompts.append(torch.tensor([ids[: given.tokens + given.scored]]))
    exact = [prefilled(loaded.model, ids[:, : given.tokens]) for ids in prompts]
    expected = [scored(loaded.model, profile, ids, kv) for ids, kv in zip(prompts, exact, strict=True)]
    print("| serde | bits a number | error of K · V | KL | first | last | same token | encode · decode, MB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for serde in serdes(profile):
        serde.decode(serde.encode(exact[0][:, :, :CHUNK].contiguous())[0])  # kernels are compiled
        made, sizes, seconds = carried(serde, exact)
        first = [torch.cat([kv[:, :, :CHUNK], whole[:, :, CHUNK:]], 2) for kv, whole in zip(made, exact, strict=True)]
        last = [torch.cat([whole[:, :, :-CHUNK], kv[:, :, -CHUNK:]], 2) for kv, whole in zip(made, exact, strict=True)]
        found = [
            torch.cat([scored(loaded.model, profile, ids, kv) for ids, kv in zip(prompts, kvs, strict=True)])
            for kvs in (made, first, last)
        ]
        report(serde.name, exact, made, sizes, seconds, torch.cat(expected), found)


def serdes(profile: Profile) -> list[Serde]:
    fp8 = Serde("fp8", lambda kv: (kv.to(torch.float8_e4m3fn), kv.numel()), lambda kv: kv.to(torch.bfloat16))
    own = [cachegen(profile)] if find_spec("lmcache") else []
    plain = [levels(profile, level, plain=True) for level in NESTED]
    return [fp8, *(levels(profile, level) for level in NESTED), *own, *plain]


def levels(profile: Profile, level: str, plain: bool = False) -> Serde:
    """Return the serde of one level, without a limit of bytes."""
    serde = LevelSerde(profile, 16)
    serde._levels = [level]
    if plain:
        serde._rope = Unmoved(**vars(serde._rope))

    def encode(kv: KV) -> tuple[Any, int]:
        out = torch.zeros(serde.estimate_serialized_size(SimpleNamespace(shapes=[kv.shape])), dtype=torch.uint8)
        serde.serialize(SimpleNamespace(tensor=kv), SimpleNamespace(tensor=out), None)
        return (out, kv.shape), int(out.nonzero()[-1]) + 1

    def decode(made: Any) -> KV:
        out = torch.empty(made[1], dtype=torch.bfloat16)
        serde.deserialize(SimpleNamespace(tensor=made[0]), SimpleNamespace(tensor=out), None)
        return out

    return Serde(f"level {level}" + (", not un-rotated" if plain else ""), encode, decode)


def cachegen(profile: Profile) -> Serde:
    from lmcache.storage_backend.serde.cachegen_basics import CacheGenGPUEncoderOutput
    from lmcache.storage_backend.serde.cachegen_decoder import decode_function_gpu, do_dequantize
    from lmcache.storage_backend.serde.cachegen_encoder import encode_function

    count, head_dim = profile.layers, profile.about["rope"]["head_dim"]
    keys, values = (torch.tensor([32.0] * fine + [16.0] * (count - fine)) for fine in (10, 2))

    def encode(kv: KV) -> tuple[Any, int]:
        heads = kv.unflatten(-1, (-1, head_dim)).transpose(0, 1)
        data = encode_function(heads, None, keys, values, kv.shape[2]).to_bytes()
        return data, len(data)

    def decode(data: Any) -> KV:
        read = CacheGenGPUEncoderOutput.from_bytes(data)
        tokens = read.max_tensors_key.shape[1]
        out = torch.zeros((tokens, 2 * count * profile.layout.channels), dtype=torch.uint8)
        sides = decode_function_gpu(read.cdf, read.data_chunks, count, tokens, out)
        each = zip(sides, (keys, values), (read.max_tensors_key, read.max_tensors_value), strict=True)
        return torch.stack([do_dequantize(*side) for side in each]).to(torch.bfloat16)

    return Serde("LMCache's CacheGen", encode, decode)


def prefilled(model: Any, ids: torch.Tensor) -> KV:
    """Compute KV as LMCache stores it: keys rotated."""
    cache = DynamicCache()
    model(ids, past_key_values=cache, logits_to_keep=1)
    sides = zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
    return torch.stack([torch.stack([one[0].transpose(0, 1).flatten(1) for one in side]) for side in sides]).bfloat16()


def scored(model: Any, profile: Profile, ids: torch.Tensor, kv: KV) -> torch.Tensor:
    """Return the log-probabilities of the tokens after cached ones, float32 `[tokens, vocabulary]`."""
    cache, head_dim = DynamicCache(), profile.about["rope"]["head_dim"]
    for layer in range(kv.shape[1]):
        sides = (kv[side, layer].float().unflatten(-1, (-1, head_dim)).transpose(0, 1)[None] for side in (0, 1))
        cache.update(*sides, layer)
    places = torch.arange(kv.shape[2], ids.shape[1])[None]
    return torch.log_softmax(model(ids[:, kv.shape[2] :], past_key_values=cache, position_ids=places).logits[0], -1)


def carried(serde: Serde, exact: list[KV]) -> tuple[list[KV], list[int], list[float]]:
    """Encode and decode all chunks; return the decoded KV, the bytes of each, and the seconds of both ways."""
    made, sizes, seconds = [], [], [0.0, 0.0]
    for kv in exact:
        parts = []
        for chunk in kv.split(CHUNK, 2):
            started = time.perf_counter()
            data, size = serde.encode(chunk.contiguous())
            encoded = time.perf_counter()
            parts.append(serde.decode(data))
            seconds = [seconds[0] + encoded - started, seconds[1] + time.perf_counter() - encoded]
            sizes.append(size)
        made.append(torch.cat(parts, 2))
    return made, sizes, seconds


def report(
    name: str,
    exact: list[KV],
    made: list[KV],
    sizes: list[int],
    seconds: list[float],
    expected: torch.Tensor,
    found: list[torch.Tensor],
) -> None:
    before, after = torch.cat(exact, 2).double(), torch.cat(made, 2).double()
    errors = ((after - before).square().mean((1, 2, 3)) / before.square().mean((1, 2, 3))).sqrt().tolist()
    losses = [f"{(expected.exp() * (expected - lossy)).sum(-1).mean():.4f}" for lossy in found]
    same = (expected.argmax(-1) == found[0].argmax(-1)).float().mean()
    bits, speeds = 8 * sum(sizes) / before.numel(), [2 * before.numel() / 1e6 / one for one in seconds]
    cells = [f"{bits:.2f}", f"{errors[0]:.3f} · {errors[1]:.3f}", *losses, f"{same:.0%}"]
    print("|", " | ".join([name, *cells, f"{speeds[0]:.0f} · {speeds[1]:.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
