"""LLVM IR of every kernel for every instruction set, in a normal form that a refactoring leaves as it is.

python -m tests.native.kernels write              # writes kernels.json anew: after a change that was meant
python -m tests.native.kernels show NAME          # the normal form of one kernel
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

TABLE = Path(__file__).with_name("kernels.json")
Kernels = Iterator[tuple[str, Callable[[], str]]]


def kernels() -> dict[str, Callable[[], str]]:
    """Return what makes the text of each kernel, by name."""
    makers = (_entropy, _transforms, _flash, _quantised, _layer, _decoding, _rows, _threads)
    found = [one for maker in makers for one in maker()]
    assert len(dict(found)) == len(found)
    return dict(found)


def hashes() -> dict[str, str]:
    """Hash every kernel's normal forms for all instruction sets; of what is made for any CPU, that of an x86 one."""
    from kvtool.core.native.isa import ISAS

    found: dict[str, Any] = {}
    with mock.patch("platform.machine", return_value="x86_64"):
        for name, make in kernels().items():
            kind, _, isa = name.rpartition("/")
            kind = kind if isa in (*ISAS, "avx512bf16") else name
            found.setdefault(kind, hashlib.sha256()).update(normal(make()).encode())
    return {kind: digest.hexdigest()[:16] for kind, digest in found.items()}


def _entropy() -> Kernels:
    from kvtool.core.codec.rans import kernels_ir
    from kvtool.core.native.isa import ISAS

    kinds = {form: kernels_ir.Decode(form) for form in (*kernels_ir.FORMS, kernels_ir.REFINE)}
    kinds |= {"encode": kernels_ir.Encode(False), "encode with contexts": kernels_ir.Encode(True)}
    kinds |= {name: getattr(kernels_ir, f"{name}_module") for name in ("symbols", "finer", "wider", "stray")}
    for isa, (name, kind) in product(ISAS, kinds.items()):
        yield f"entropy/{name}/{isa}", lambda isa=isa, kind=kind: kind(ISAS[isa])


def _transforms() -> Kernels:
    from kvtool.core.codec import transform_kernels
    from kvtool.core.native.builder import STORED
    from kvtool.core.native.isa import AVX512, ISAS

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
    from kvtool.core.kernels.attention.flash_ir import Tiling, attention_module
    from kvtool.core.native.builder import STORED
    from kvtool.core.native.isa import AVX512_BF16, ISAS

    for name, stored in product(ISAS, STORED):
        yield f"flash/{stored}/{name}", lambda name=name, stored=stored: attention_module(Tiling(ISAS[name], stored))
    yield "flash/bfloat16/avx512bf16", lambda: attention_module(Tiling(AVX512_BF16, "bfloat16", pairs=True))


def _quantised() -> Kernels:
    from kvtool.core.kernels.linear.gemm_ir import product as multiply
    from kvtool.core.kernels.linear.gemm_ir import share, small_gemm, unpack
    from kvtool.core.kernels.linear.qtensor import LAYOUTS
    from kvtool.core.native.builder import module
    from kvtool.core.native.isa import AVX2, AVX512_BF16, ISAS

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
    from kvtool.core.kernels.layer.cpu import layer_module
    from kvtool.core.kernels.linear import onednn as ir_panels
    from kvtool.core.native.isa import ISAS
    from kvtool.core.native.simd import ACTIVATIONS

    for name, element, act in product(ISAS, ("float32", "bfloat16"), ACTIVATIONS):
        yield f"layer/{element}/{act}/{name}", lambda n=name, e=element, a=act: layer_module(ISAS[n], e, a)
    yield "layer/panels/avx512bf16", ir_panels.panels_module


def _decoding() -> Kernels:
    from kvtool.core.kernels.decode_ir import Code, Heads, module, products
    from kvtool.core.native.isa import ISAS

    codes = {
        "plain": Code(Heads(64, 7, False, "float32"), frozenset({"float32", "q4_0"}), frozenset({64}), "silu"),
        "normed": Code(Heads(128, 2, True, "bfloat16"), frozenset({"bfloat16"}), frozenset({128}), "silu"),
        "partly": Code(Heads(80, 1, False, "bfloat16"), frozenset({"q6_k"}), frozenset({32, 20}), "gelu_tanh"),
        "unrotated": Code(Heads(24, 5, True, "float32"), frozenset({"q4_k"}), frozenset({0}), "gelu_tanh"),
    }
    for name, (what, code) in product(ISAS, codes.items()):
        yield f"decoding/{what}/{name}", lambda name=name, code=code: module(ISAS[name], code)
    for name, kind in product(ISAS, ("bfloat16", "q4_k")):
        yield f"decoding/products {kind}/{name}", lambda name=name, kind=kind: products(ISAS[name], kind, 3)


def _rows() -> Kernels:
    from kvtool.core.kernels.rope import rotation_module
    from kvtool.core.kernels.shift import offsets_module
    from kvtool.core.native.builder import STORED
    from kvtool.core.native.isa import AVX2

    for stored in STORED:
        for kept in dict.fromkeys((stored, "float32")):
            yield f"rotation/{stored}/{kept}", lambda stored=stored, kept=kept: rotation_module(stored, kept, AVX2)
        for lanes, (dim, half) in product((8, 16), ((64, 32), (128, 0), (96, 16))):
            yield (
                f"offsets/{stored}/{lanes}/{dim}/{half}",
                lambda s=stored, w=lanes, d=dim, h=half: offsets_module(AVX2, s, w, d, h),
            )


def _threads() -> Kernels:
    from kvtool.core.native.isa import SCALAR
    from kvtool.core.native.threads import pool_module

    yield "threads", lambda: pool_module(SCALAR)


# ---- the normal form ---------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Instruction:
    block: int
    text: str
    name: str = ""  # of its value; empty: it has none

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.text)

    @property
    def is_phi(self) -> bool:
        """Whether it takes a value by where the block was entered from."""
        return self.text.startswith("phi")

    @property
    def is_pure(self) -> bool:
        """Return True if it may be anywhere in its block, and be removed if nothing uses its value."""
        text = self.text
        if text.startswith("call"):
            return "@llvm." in text and not re.search(r"@llvm\.(memcpy|prefetch)", text)
        if text.startswith("load"):
            return not re.match(r"load (volatile|atomic)", text)
        return not text.startswith(("br ", "ret", "store", "atomicrmw", "alloca", "phi"))


_NAME = re.compile(r"%[\w.]+")
_SWAPPED = re.compile(r"(add|mul|and|or|xor|fadd|fmul|icmp eq|icmp ne) (<[^>]*>|\S+) ([^,]+), ([^,]+)$")
_GREATER = re.compile(r"(icmp [us]|fcmp [ou])g([te]) (<[^>]*>|\S+) ([^,]+), ([^,]+)$")
_FMA = re.compile(r"(call (.*) @llvm\.fmuladd\.\w+\()(.*)\)$")
_SAME = (  # value that is another one
    re.compile(r"getelementptr .*, ptr (\S+), i64 0$"),
    re.compile(r"(?:add|sub|shl|lshr) i64 (\S+), 0$"),
    re.compile(r"add i64 0, (\S+)$"),
    re.compile(r"mul i64 (\S+), 1$"),
)


def normal(text: str) -> str:
    """Rewrite LLVM IR such that numbering, declarations, the order of pure instructions and dead ones do not show."""
    functions, constants, lines = [], [], []
    for line in text.splitlines():
        if line.startswith("@"):
            constants.append(line)
        elif line.startswith("define"):
            lines = [line]
        elif line == "}":
            functions.append(_function(lines))
        elif line.strip() and not line.startswith("declare"):
            lines.append(line.strip())
    return "\n".join(sorted(constants) + sorted(functions)) + "\n"


def _function(lines: list[str]) -> str:
    head, body = _constants(lines[0]), lines[1:]
    renamed = {name: f"%a{at}" for at, name in enumerate(_NAME.findall(head))}
    renamed |= {f"%{line[:-1]}": f"%b{at}" for at, line in enumerate(one for one in body if one.endswith(":"))}
    found, block, effects = list[_Instruction](), -1, 0
    same, keys = dict[str, str](), dict(renamed)  # equal instructions have one key
    for line in body:
        if line.endswith(":"):
            block += 1
            continue
        name, _, text = line.partition(" = ") if line.startswith("%") else ("", "", line)
        text = _NAME.sub(lambda one: same.get(one[0], one[0]), text)
        one = _Instruction(block, _folded(_ordered(_constants(text), keys)), name)
        alias = next((match[1] for match in (known.match(one.text) for known in _SAME) if match), "")
        if alias or one.text.startswith(("splat", "zeroinit")):
            same[name] = alias or one.text
            continue
        where = f"{block}" if one.is_pure and not text.startswith("load") else f"{block} {effects}"
        if not one.is_pure:
            effects += 1
        key = _key(f"{where} {one.text}", keys)
        if one.is_pure and key in keys:
            same[name] = keys[key]
            continue
        keys |= {name: key, key: name} if name else {}
        found.append(one)
    head = _NAME.sub(lambda name: renamed[name[0]], head)
    return "\n".join([head, *_printed(found, renamed, same), "}"])


def _key(text: str, keys: dict[str, str]) -> str:
    return hashlib.sha256(_NAME.sub(lambda one: keys.get(one[0], "?"), text).encode()).hexdigest()


def _ordered(text: str, keys: dict[str, str]) -> str:
    """Operands that may change places in an order that is not that of their names."""
    if match := _GREATER.match(text):
        text = f"{match[1]}l{match[2]} {match[3]} {match[5]}, {match[4]}"
    if match := _SWAPPED.match(text):
        first, second = sorted((match[3], match[4]), key=lambda one: (one not in keys, keys.get(one)))
        text = f"{match[1]} {match[2]} {first}, {second}"
    if match := _FMA.match(text):
        kind = match[2]
        *factors, more = (part.strip(", ") for part in match[3].split(f"{kind} ")[1:])
        first, second = sorted(factors, key=lambda one: (one not in keys, keys.get(one)))
        text = f"{match[1]}{kind} {first}, {kind} {second}, {kind} {more})"
    return text


def _constants(text: str) -> str:
    """Float constants by their bits, zeros alike."""
    text = re.sub(r"(?<=[\s(\[])-?\d+\.\d+(?=[\s,)]|$)", lambda one: _bits(float(one[0])), text)
    return re.sub(r"splat \(\w+ (0|0x0+)\)", "zeroinitializer", text)


def _folded(text: str) -> str:
    """A cast of a constant as the constant."""
    if match := re.match(r"(bitcast|sitofp) <\d+ x i32> splat \(i32 (-?\d+)\) to <\d+ x float>$", text):
        number = int(match[2])
        value = number if match[1] == "sitofp" else struct.unpack("<f", struct.pack("<I", number & 0xFFFFFFFF))[0]
        return f"splat (float {_bits(float(value))})"
    return text


def _bits(number: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def _printed(found: list[_Instruction], renamed: dict[str, str], same: dict[str, str]) -> list[str]:
    """The living instructions of each block, in the order in which those with an effect need them."""

    def whole(name: str) -> str:
        return whole(same[name]) if name in same else name

    for one in found:  # phis name values that come later
        one.text = _NAME.sub(lambda name: whole(name[0]), one.text)
    by_name = {one.name: one for one in found if one.name}
    ordered, placed = list[_Instruction](), set[_Instruction]()

    def visit(one: _Instruction, through_phis: bool = False) -> None:
        for name in one.operands if through_phis or not one.is_phi else ():
            if name in by_name and name not in renamed:
                visit(by_name[name])
        if one not in placed:
            placed.add(one)
            renamed.setdefault(one.name, f"%{len(renamed)}")
            ordered.append(one)

    for one in found:
        if not one.is_pure and not one.is_phi:
            visit(one)
    for one in ordered:  # which grows
        visit(one, through_phis=True)
    lines = list[str]()
    for block in range(1 + max(one.block for one in found)):
        own = sorted((one for one in ordered if one.block == block), key=lambda one: not one.is_phi)
        lines += [f"b{block}:", *(f"  {one.name} = {one.text}" if one.name else f"  {one.text}" for one in own)]
    return [_NAME.sub(lambda one: renamed.get(one[0], one[0]), line) for line in lines]


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


def main(action: str = "", *rest: str) -> None:
    if action == "write":
        TABLE.write_text(json.dumps(hashes(), indent=0, sort_keys=True) + "\n")
    elif action == "show":
        sys.stdout.write(normal(kernels()[rest[0]]()))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
