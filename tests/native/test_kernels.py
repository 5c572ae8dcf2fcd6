"""Every kernel's LLVM IR is what it was: a change of the emitter changes none unless that is meant."""

from __future__ import annotations

import json
import re

import llvmlite.binding
import pytest

from kvtool.core.native.isa import NEON
from kvtool.core.native.threads import pool_module
from tests.native.kernels import TABLE, declared, hashes, kernels, normal


def test_no_kernel_has_changed() -> None:
    """Those that should have: `python -m tests.native.kernels write`, and their names in the commit's message."""
    known, found = json.loads(TABLE.read_text()), hashes()
    assert sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name)) == []


NEON_KERNELS = {name: make for name, make in kernels().items() if name.endswith("/neon")}
NEON_KERNELS["threads"] = lambda: pool_module(NEON)
KINDS = sorted({name.partition("/")[0] for name in NEON_KERNELS})


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_compiles_for_arm(kind: str) -> None:
    """Without an intrinsic of x86, and without a library that a process might lack."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    target = llvmlite.binding.Target.from_triple("aarch64-linux-gnu")
    machine = target.create_target_machine(cpu=NEON.cpu, features=NEON.extra, opt=2)
    for name in [name for name in NEON_KERNELS if name.partition("/")[0] == kind]:
        text = declared(NEON_KERNELS[name]())
        assert "llvm.x86" not in text, name
        assembly = machine.emit_assembly(llvmlite.binding.parse_assembly(text))
        called = set(re.findall(r"\sbl?\s+([a-zA-Z_]\w*)", assembly))
        assert called <= {*re.findall(r"(?:define|declare) [^@\n]*@(\w+)\(", text), "memcpy"}, name


FIRST = """
declare i64 @llvm.umin.i64(i64, i64)
define void @f(ptr %job, i64 %n) {
entry:
  %v1 = load i64, ptr %job, align 8
  %v2 = mul i64 %v1, %n
  %v3 = add i64 %v2, 7
  br label %b1
b1:
  %b1.0 = phi i64 [0, %entry], [%v4, %b1]
  %v4 = add i64 %b1.0, 1
  %v5 = getelementptr i64, ptr %job, i64 %v4
  store i64 %v3, ptr %v5, align 8
  %v6 = icmp ult i64 %v4, %v1
  br i1 %v6, label %b1, label %b2
b2:
  ret void
}
"""


def test_the_normal_form_knows_no_numbering() -> None:
    other = FIRST.replace("%v3 ", "%x ").replace("%v3,", "%x,").replace("b1", "again").replace("%n", "%count")
    other = other.replace("%v2 = mul i64 %v1, %count", "%dead = add i64 %v1, 5\n  %v2 = mul i64 %count, %v1")
    assert other != FIRST
    assert normal(other) == normal(FIRST)


def test_the_normal_form_knows_everything_else() -> None:
    changes = {"mul i64": "add i64", "add i64 %v2, 7": "add i64 %v2, 8", "[0, %entry]": "[1, %entry]"}
    changes |= {"i64 %v3, ptr %v5": "i64 %v2, ptr %v5", "icmp ult": "icmp slt", "ptr %job, align": "ptr %v9, align"}
    for before, after in changes.items():
        assert normal(FIRST.replace(before, after)) != normal(FIRST), before
