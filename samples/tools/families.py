"""Write the page of model families from what the tests cover: each family's kinds of layers, as the built model says.

    python samples/tools/families.py            writes the page `models`, and the number of families in README.md
    python samples/tools/families.py --check    says whether they are as they would be written

A family is a tiny model with random weights of the real configuration class (`tests/families.py`, `tests/wrappers.py`),
over which the laws run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtool.core.checkpoint.architecture import FAMILIES as LISTED  # noqa: E402
from kvtool.core.checkpoint.support import text_config  # noqa: E402
from kvtool.core.common.collecting import quiet  # noqa: E402
from kvtool.core.kernels.attention import flash_cpu  # noqa: E402
from kvtool.core.kernels.attention.dispatch import Explanation, explain  # noqa: E402
from kvtool.core.kernels.attention.params import AttentionCall  # noqa: E402
from kvtool.core.model.decode import decode_backend  # noqa: E402
from kvtool.core.model.decoder import Decoder  # noqa: E402
from kvtool.core.model.prompt_cache import LayerKind  # noqa: E402
from kvtool.core.session.gate import check_invariants  # noqa: E402
from tests.checkpoint.gguf_models import IN_GGUF  # noqa: E402
from tests.families import FAMILIES, HYBRIDS, KINDS, tiny_model  # noqa: E402
from tests.fusion.making import CHUNKS, PREFIX, decoder_of  # noqa: E402
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS, text_model  # noqa: E402

PAGE, README = ROOT / "kvtool" / "docs" / "reference" / "models.md", ROOT / "README.md"
_NUMBER = re.compile(r"\[\d+ families\]")
PROMPT, QUESTION_ROWS = 4096, 32  # tokens
ALL, EXACT, FULL_ALONE = "all", "`full`, `prefix`", "`full`"
_HEAD = """# Model families

kvtool reads a model's configuration and layers. A family that is not listed here is expected to rotate keys as Llama \
does; its keys and layers are checked when it is loaded, and it is refused with a reason if it cannot work. The tests \
check the [laws](../internals/design.md#laws) on a tiny random model of each configuration class; \
`samples/tools/families.py` in the repository writes this page from them.

kvtool reads safetensors of all families, and GGUF files with packed weights of these architectures: {gguf}.

Families in **bold** are tested with every mode in float32 and bfloat16, the others with the modes that differ in \
their computation. Families in *italics* are the text models of vision models.

| layers | modes | families |
| --- | --- | --- |"""
_PATHS = f"""
## What kvtool computes itself

Models of the types {", ".join(f"`{name}`" for name in sorted(LISTED))} are built without importing `transformers`, \
which takes half of the time of a start. Other types, and settings that kvtool does not know, need it.

kvtool computes the layers of a prompt itself, on a CPU and on a GPU, and decodes in machine code on a CPU. The \
exceptions below are computed by the model's own modules, or by torch. They are those of a CPU with AVX2 in float32; \
"attention" is that of {QUESTION_ROWS} rows over {PROMPT:,} tokens. "layers" holds for a GPU, too. \
`kvtool query --explain` reports the same for your model.

| exception | reason | families |
| --- | --- | --- |"""
_LEFT = """
## Refused models, and what they would need

| refused | would need |
| --- | --- |"""
_REFUSED = (
    (
        "keys chosen by their content (DeepSeek V3.2, GLM-5, MiniMax M3)",
        "records that also contain the index of the choice, and a new choice after a chunk has moved",
    ),
    (
        "a norm with a weight for each number of a key, after its rotation (HunYuan): a score depends on the "
        "positions of its tokens, not only on their distance",
        "chunks computed at their final positions",
    ),
    (
        "attention over other keys and values than the cache contains (DiffLlama, JetMoE)",
        "the same transformation of keys and values when they are loaded",
    ),
    (
        "attention outside the common interface of `transformers` (Falcon, GPT-J, CodeGen, GPT-NeoX Japanese)",
        "kvtool's rows and masks in that code",
    ),
    (
        "bidirectional attention (PaliGemma), layers that attend to images (Mllama)",
        "a mask that is not causal; images",
    ),
    (
        "`prefix` of a model whose forward cannot continue from a state with several tokens (Jamba): the gate finds it",
        "a forward that can; `full` works",
    ),
    (
        "states in a custom cache (MiniMax), attention shared between layers (Zamba 2), a state in every "
        "layer (Mamba, RWKV), states combined with sliding windows or sparse attention",
        "a layer type of the prompt cache for each of these",
    ),
    (
        "GGUF files of other architectures than those above (Granite, Cohere, OLMo, DeepSeek), of Mixtral, and of "
        "StableLM with normed queries and keys",
        "a reader for their names and layouts; the model's original safetensors work",
    ),
    ("positions without rotation (GPT-2, OPT, BLOOM, MPT); encoder-decoders", "another way to move a key"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page is another one")
    check = parser.parse_args().check
    for path, written in ((PAGE, page()), (README, readme())):
        if not check:
            path.write_text(written, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != written:
            raise SystemExit(f"{path} is not what the tests cover: run samples/tools/families.py")


def readme() -> str:
    """Return README.md with the number of tested families."""
    tested = FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS
    return _NUMBER.sub(f"[{len(tested)} families]", README.read_text(encoding="utf-8"))


def page() -> str:
    """The whole page, in Markdown."""
    gguf = ", ".join(f"`{name}`" for name in sorted({model.architecture for model in IN_GGUF.values()}))
    with quiet():
        decoders = {name: decoder_of(tiny_model(name)) for name in FAMILIES | HYBRIDS}
        decoders |= {name: decoder_of(text_model(name)) for name in WRAPPERS | HYBRID_WRAPPERS}
        tables = (
            (_HEAD.format(gguf=gguf), _families(decoders)),
            (_PATHS, _exceptions(decoders)),
            (_LEFT, (f"| {what} | {need} |" for what, need in _REFUSED)),
        )
        return "\n".join(line for head, lines in tables for line in (head, *lines)) + "\n"


def _families(decoders: dict[str, Decoder]) -> Iterator[str]:
    """Yield a table row for each combination of layers and modes."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, config in (FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS).items():
        decoder = decoders[name]
        modes = exactly(decoder) if decoder.keeps_states else ALL
        mark = "**" if name in KINDS else "*" if name in WRAPPERS | HYBRID_WRAPPERS else ""
        family = f"{mark}{name}{mark} (`{type(config()).__name__}`)"
        names.setdefault((layers_of(decoder), modes), []).append(family)
    for (layers, modes), families in names.items():
        yield f"| {layers} | {modes} | {', '.join(families)} |"


def _exceptions(decoders: dict[str, Decoder]) -> Iterator[str]:
    """Yield a table row for each part that machine code does not compute of some families."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS:
        for exception in exceptions_of(decoders[name]):
            names.setdefault(exception, []).append(name)
    for (part, reason), families in sorted(names.items()):
        yield f"| {part} | {reason} | {', '.join(families)} |"


def exceptions_of(decoder: Decoder) -> set[tuple[str, str]]:
    """Return the parts that machine code does not compute on a CPU with AVX2, each with the reason."""
    _, cache = decoder.prefill(PREFIX, reserve=1)
    backend = decode_backend(decoder, cache)
    backend.step(PREFIX[0])
    layers, decoding = _without_class(decoder.forward.why), _without_class(backend.why)
    same = layers == decoding
    parts = {"layers, decoding": layers} if same else {"layers": layers, "decoding": decoding}
    chosen = backends_of(decoder, QUESTION_ROWS, PROMPT)
    attention = {
        ("attention", f"{dict(one.declined)[flash_cpu.name]}: {one.serves.name}")
        for one in chosen
        if one.serves is not flash_cpu
    }
    return {(part, reason) for part, reason in parts.items() if reason} | attention


def backends_of(decoder: Decoder, rows: int, keys: int) -> list[Explanation]:
    """Return the attention backends of a model's layers, one for each kind, for so many rows over so many keys."""
    calls = {
        AttentionCall(
            device=decoder.device.partition(":")[0],
            dtype=decoder.dtype,
            heads=int(decoder.config.num_attention_heads),
            kv_heads=kind.shape.heads,
            key_dim=kind.shape.attended,
            value_dim=kind.shape.value_dim,
            rows=rows,
            keys=keys,
            window=kind.window,
            softcap=kind.softcap is not None,
            sinks=kind.sinks,
            causal=rows == keys > 1 and kind.is_plain,
        )
        for kind in decoder.kinds
    }
    return [explain(call) for call in calls]


def _without_class(reason: str) -> str:
    return re.sub(r"^[A-Z]\w+ (?=has )", "", reason or "")


def exactly(decoder: Decoder) -> str:
    """Return the modes of a recurrent model; the gate decides whether it can continue from a saved state."""
    return EXACT if check_invariants(decoder, "", PREFIX, CHUNKS).passed else FULL_ALONE


def layers_of(decoder: Decoder) -> str:
    """Describe the layers in words."""
    words = [_seen(decoder), *_scores(decoder.kinds), *_positions(decoder), *_shapes(decoder)]
    return ", ".join(word for word in words if word)


def _seen(decoder: Decoder) -> str:
    windowed = sum(kind.window is not None for kind in decoder.kinds)
    if decoder.keeps_states:
        return "recurrent and full attention" if decoder.kinds else "recurrent"
    return "full" if not windowed else "windows" if windowed == len(decoder.kinds) else "windows and full"


def _scores(kinds: tuple[LayerKind, ...]) -> Iterator[str]:
    if any(kind.softcap is not None for kind in kinds):
        yield "softcap"
    if any(kind.sinks for kind in kinds):
        yield "sinks"


def _positions(decoder: Decoder) -> Iterator[str]:
    names = {kind.rotation for kind in decoder.kinds}
    if None in names:
        yield "no positions" if names == {None} else "no positions in some"
    if len(names - {None}) > 1:
        yield "RoPE by kind of layer"
    if hasattr(getattr(decoder.base, "rotary_emb", None), "mrope_section"):
        yield "M-RoPE"


def _shapes(decoder: Decoder) -> Iterator[str]:
    if any(kind.shape.joint for kind in decoder.kinds):
        yield "latents"
    if any(kind.source is not None for kind in decoder.kinds):
        yield "layers that share KV"
    text = text_config(decoder.config)
    if any(getattr(text, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "num_local_experts")):
        yield "experts"


if __name__ == "__main__":
    main()
