"""Write the page of model families from what the tests cover: each family's kinds of layers, as the built model says.

    python samples/tools/families.py            writes the page `models`, and the number of families in README.md
    python samples/tools/families.py --check    says whether they are as they would be written

A family is a tiny model with random weights of the real configuration class (`tests/families.py`, `tests/wrappers.py`),
over which the laws run. It is built and asked what its layers are; nothing of the page is written by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtool.core.checkpoint.text_submodel import text_config  # noqa: E402
from kvtool.core.common.collecting import quiet  # noqa: E402
from kvtool.core.kernels.attention import flash_cpu  # noqa: E402
from kvtool.core.model.decode import decode_backend  # noqa: E402
from kvtool.core.model.decoder import Decoder  # noqa: E402
from kvtool.core.model.kinds import LayerKind  # noqa: E402
from kvtool.core.query.explain import LayerBackends, backends_of  # noqa: E402
from kvtool.core.session.gate import check_invariants  # noqa: E402
from samples.tools.layer_bytes import kept  # noqa: E402
from tests.checkpoint.gguf_models import IN_GGUF  # noqa: E402
from tests.families import FAMILIES, HYBRIDS, KINDS, tiny_model  # noqa: E402
from tests.fusion.making import CHUNKS, PREFIX, decoder_of  # noqa: E402
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS, text_model  # noqa: E402

PAGE, README = ROOT / "kvtool" / "docs" / "reference" / "models.md", ROOT / "README.md"
_NUMBER = re.compile(r"\[\d+ families\]")
PROMPT, QUESTION_ROWS = 4096, 32  # tokens
ALL, EXACT, FULL_ALONE = "all", "`full`, `prefix`", "`full`"
_HEAD = (
    "# Model families\n"
    "\n"
    "kvtool accepts a model by its configuration and its layers, not by its name. A family that is not listed"
    " here is tried, and refused with a reason if it cannot work. The tests check the "
    "[laws](../internals/design.md#laws) "
    "on a tiny random model of each configuration class; `samples/tools/families.py` writes this page from "
    "them.\n"
    "\n"
    "- **KV**: size of one token of the tiny model in a store, in bytes of bfloat16. 512 means plain keys and"
    " values: two heads of 16 in four layers. States are not counted."
    " [Layers](../../../samples/results/scale.md#what-kinds-of-layers-store-and-read) has the numbers of real models.\n"
    "- **tested**: *in full* with every mode in float32 and bfloat16, for families with a kind of layer of "
    "their own; otherwise with the modes that differ in their computation.\n"
    "- **GGUF**: architecture name of the GGUF files that kvtool reads with packed weights. –: kvtool refuses"
    " GGUF files of this family, because `transformers` does not read them.\n"
)
_ROW = "| {name} | `{config}` | {layers} | {kv} | {modes} | {tested} | {gguf} |"
_TABLE = """| family | configuration | layers | KV | modes | tested | GGUF |
| --- | --- | --- | --- | --- | --- | --- |"""
_PATHS = (
    "## What machine code computes on a CPU\n"
    "\n"
    "Results for the same tiny models in float32 on a CPU with AVX2. A reason means that the model's own "
    "layers, or torch, compute that part. `kvtool query --explain` reports the same for your model.\n"
    "\n"
    "- **Fused layers** compute a prompt's rows: everything between a layer's products and its attention, in "
    "a few calls. Experts are computed by their own module.\n"
    "- **Native decoding** computes a whole token in one call.\n"
    "- **Native attention** computes the attention of a question's 32 rows over a prompt of 4,096 tokens.\n"
    "\n"
    "| family | fused layers | native decoding | native attention |\n"
    "| --- | --- | --- | --- |"
)
_LEFT = """## Refused models, and what they would need

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
        "attention by code of its own (Falcon, GPT-J, CodeGen, GPT-NeoX Japanese)",
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
        "states in a cache of a family's own (MiniMax), attention shared between layers (Zamba 2), a state in every "
        "layer (Mamba, RWKV), states combined with sliding windows or sparse attention",
        "a layer type of the prompt cache for each of these",
    ),
    (
        "GGUF files of other architectures than those above (Granite, Cohere, OLMo, DeepSeek), of Mixtral, of "
        "StableLM with normed queries and keys, and of Qwen3.5-MoE where the two halves of an expert are packed "
        "otherwise",
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
    with quiet():
        layers, paths = zip(*rows(), strict=True)
    left = (f"| {what} | {need} |" for what, need in _REFUSED)
    return "\n".join([_HEAD, _TABLE, *layers, "", _PATHS, *paths, "", _LEFT, *left, ""])


def rows() -> Iterator[tuple[str, str]]:
    """A row of each table for each family, those with kinds of layers of their own first."""
    for name in FAMILIES:
        decoder = decoder_of(tiny_model(name))
        yield row(name), path(name, decoder)
    for name, config in WRAPPERS.items():
        decoder = decoder_of(text_model(name))
        yield _row(name, config(), decoder, ALL, "its text model"), path(name, decoder)
    for name, config in HYBRIDS.items():
        decoder = decoder_of(tiny_model(name))
        yield _row(name, config(), decoder, exactly(decoder), "yes"), path(name, decoder)
    for name, config in HYBRID_WRAPPERS.items():
        decoder = decoder_of(text_model(name))
        yield _row(name, config(), decoder, exactly(decoder), "its text model"), path(name, decoder)


def path(name: str, decoder: Decoder) -> str:
    """Return a table row of what machine code computes of a family on a CPU with AVX2, and why not the rest."""
    _, cache = decoder.prefill(PREFIX, reserve=1)
    backend = decode_backend(decoder, cache)
    backend.step(PREFIX[0])
    fused = decoder.unfused or "yes"
    attended = {_attended(one) for one in backends_of(decoder, QUESTION_ROWS, PROMPT)}
    return f"| {name} | {fused} | {backend.why or 'yes'} | {'; '.join(sorted(attended))} |"


def _attended(layers: LayerBackends) -> str:
    reasons = dict(layers.chosen.declined)
    return "yes" if layers.chosen.serves is flash_cpu else f"{reasons[flash_cpu.name]}: {layers.chosen.serves.name}"


def exactly(decoder: Decoder) -> str:
    """Return the modes of a recurrent model; the gate decides whether it can continue from a saved state."""
    return EXACT if check_invariants(decoder, "", PREFIX, CHUNKS).passed else FULL_ALONE


def row(name: str) -> str:
    """The row of a family of text models that all modes are for."""
    return _row(name, FAMILIES[name](), decoder_of(tiny_model(name)), ALL, "in full" if name in KINDS else "yes")


def _row(name: str, config: Any, decoder: Decoder, modes: str, tested: str) -> str:
    return _ROW.format(
        name=name,
        config=type(config).__name__,
        layers=layers_of(decoder),
        kv=kept(decoder),
        modes=modes,
        tested=tested,
        gguf=f"`{IN_GGUF[name].architecture}`" if name in IN_GGUF else "–",
    )


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
