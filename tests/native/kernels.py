"""LLVM IR of every kernel for every instruction set; `python -m tests.native.kernels` writes kernels.json anew."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from kvtool.core.codec import transform_kernels
from kvtool.core.codec.rans import kernels_ir
from kvtool.core.kernels import decode_ir
from kvtool.core.kernels.attention.flash_ir import Tiling, attention_module
from kvtool.core.kernels.decode_ir import Code, Heads
from kvtool.core.kernels.layer_cpu import layer_module
from kvtool.core.kernels.linear.gemm_ir import product as multiply
from kvtool.core.kernels.linear.gemm_ir import share, small_gemm, unpack
from kvtool.core.kernels.linear.qtensor import LAYOUTS
from kvtool.core.kernels.rope import rotation_module
from kvtool.core.kernels.shift import offsets_module
from kvtool.core.native.builder import STORED, module
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16, ISAS, SCALAR
from kvtool.core.native.simd import ACTIVATIONS
from kvtool.core.native.threads import pool_module

TABLE = Path(__file__).with_name("kernels.json")
Kernels = Iterator[tuple[str, Callable[[], str]]]


def kernels() -> dict[str, Callable[[], str]]:
    makers = (_entropy, _transforms, _flash, _quantised, _layer, _decoding, _rows, _threads)
    found = [one for maker in makers for one in maker()]
    assert len(dict(found)) == len(found)
    return dict(found)


def hashes() -> dict[str, str]:
    """Hash every kernel's texts for all instruction sets; of what is made for any CPU, that of an x86 one."""
    found: dict[str, Any] = {}
    with mock.patch("platform.machine", return_value="x86_64"):
        for name, make in kernels().items():
            kind, _, isa = name.rpartition("/")
            kind = kind if isa in (*ISAS, "avx512bf16") else name
            found.setdefault(kind, hashlib.sha256()).update(make().encode())
    return {kind: digest.hexdigest()[:16] for kind, digest in found.items()}


def _entropy() -> Kernels:
    kinds: dict[str, Any] = {"int16": kernels_ir.Decode(), "refine": kernels_ir.Decode(refines=True)}
    kinds |= {"encode": kernels_ir.Encode(False), "encode with contexts": kernels_ir.Encode(True)}
    kinds |= {name: getattr(kernels_ir, f"{name}_module") for name in ("symbols", "finer")}
    for isa, (name, kind) in product(ISAS, kinds.items()):
        yield f"entropy/{name}/{isa}", lambda isa=isa, kind=kind: kind(ISAS[isa])


def _transforms() -> Kernels:
    for name, form in product(ISAS, STORED):
        kinds = {"errors": transform_kernels.Errors(form)}
        for depth in (64, 192):
            pitch = transform_kernels.pitch_of(depth)
            kinds |= {f"forward {depth}": transform_kernels.Forward(form, pitch)}
            kinds |= {f"backward {depth}": transform_kernels.Backward(form, pitch)}
        for what, kind in kinds.items():
            yield f"codec/{what}/{form}/{name}", lambda kind=kind, name=name: kind(ISAS[name])
    pairs = transform_kernels.Backward("bfloat16", transform_kernels.pitch_of(96), pairs=True)
    yield "codec/backward pairs/bfloat16/avx512", lambda: pairs(AVX512)


def _flash() -> Kernels:
    for name, stored in product(ISAS, STORED):
        yield f"flash/{stored}/{name}", lambda name=name, stored=stored: attention_module(Tiling(ISAS[name], stored))
    yield "flash/bfloat16/avx512bf16", lambda: attention_module(Tiling(AVX512_BF16, "bfloat16", pairs=True))


def _quantised() -> Kernels:
    for (name, isa), (kind, layout) in product(ISAS.items(), LAYOUTS.items()):
        for height in (1, 3, 4):
            yield f"product/{kind}/{height}/{name}", lambda i=isa, k=kind, h=height: module(multiply(i, k, h))
        yield f"small_gemm/{kind}/float32/{name}", lambda i=isa, k=kind: module(small_gemm(i, k, "float32"))
        for to in () if layout.dense else ("float32", "bfloat16"):
            yield f"unpack/{kind}/{to}/{name}", lambda i=isa, k=kind, t=to: module(unpack(i, k, t))
    for kind, layout in LAYOUTS.items():
        yield f"small_gemm/{kind}/bfloat16/avx512bf16", lambda k=kind: module(small_gemm(AVX512_BF16, k, "bfloat16"))
        if not layout.dense:
            yield f"unpack/{kind}/bfloat16/avx512bf16", lambda k=kind: module(unpack(AVX512_BF16, k, "bfloat16"))
    for function in (multiply(AVX2, "q4_0"), unpack(AVX2, "q4_0", "float32")):
        yield f"share/{function.name}", lambda function=function: module(share(function))


def _layer() -> Kernels:
    for name, element, act in product(ISAS, ("float32", "bfloat16"), ACTIVATIONS):
        yield f"layer/{element}/{act}/{name}", lambda n=name, e=element, a=act: layer_module(ISAS[n], e, a)


def _decoding() -> Kernels:
    codes = {
        "plain": Code(Heads(64, 7, False, "float32"), frozenset({"float32", "q4_0"}), frozenset({64}), "silu"),
        "normed": Code(Heads(128, 2, True, "bfloat16"), frozenset({"bfloat16"}), frozenset({128}), "silu"),
        "partly": Code(Heads(80, 1, False, "bfloat16"), frozenset({"q6_k"}), frozenset({32, 20}), "gelu_tanh"),
        "unrotated": Code(Heads(24, 5, True, "float32"), frozenset({"q4_k"}), frozenset({0}), "gelu_tanh"),
    }
    for name, (what, code) in product(ISAS, codes.items()):
        yield f"decoding/{what}/{name}", lambda name=name, code=code: decode_ir.module(ISAS[name], code)
    for name, kind in product(ISAS, ("bfloat16", "q4_k")):
        yield f"decoding/products {kind}/{name}", lambda name=name, kind=kind: decode_ir.products(ISAS[name], kind, 3)


def _rows() -> Kernels:
    for stored in STORED:
        for kept in dict.fromkeys((stored, "float32")):
            yield f"rotation/{stored}/{kept}", lambda stored=stored, kept=kept: rotation_module(stored, kept, AVX2)
        for lanes, (dim, half) in product((8, 16), ((64, 32), (128, 0), (96, 16))):
            yield (
                f"offsets/{stored}/{lanes}/{dim}/{half}",
                lambda s=stored, w=lanes, d=dim, h=half: offsets_module(AVX2, s, w, d, h),
            )


def _threads() -> Kernels:
    yield "threads", lambda: pool_module(SCALAR)


def declared(text: str) -> str:
    """Declare every intrinsic and every function of another module that a text calls."""
    lines = set[str]()
    for function, arguments in re.findall(r"call void (@(?:product|unpack)_\w+)(\([^)]*\))", text):
        if not re.search(rf"define .*{function}\(", text):
            lines.add(f"declare void {function}({', '.join(one.split()[0] for one in arguments[1:-1].split(','))})")
    for result, name, arguments in re.findall(r"call (?:\w+ )*?(<[^>]*>|\w+) (@llvm\.[\w.]+)\((.*)\)", text):
        types = re.findall(r"(<[^>]*>|[a-z]\w*) [%\w.\-]+", re.sub(r"splat \([^)]*\)", "zero", arguments))
        lines.add(f"declare {result} {name}({', '.join(types)})")
    kept = [line for line in text.splitlines() if not line.startswith("declare") or "@llvm." not in line]
    return "\n".join([*kept, *sorted(lines), ""])


if __name__ == "__main__":
    TABLE.write_text(json.dumps(hashes(), indent=0, sort_keys=True) + "\n")
