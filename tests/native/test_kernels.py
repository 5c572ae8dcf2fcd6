"""Every kernel's LLVM IR is what it was: a change of the emitter changes none unless that is meant."""

from __future__ import annotations

import json
import re

import llvmlite.binding
import pytest

from kvtool.core.native.isa import NEON
from kvtool.core.native.threads import pool_module
from tests.native.kernels import TABLE, declared, hashes, kernels


def test_no_kernel_has_changed() -> None:
    """Those that should have: `python -m tests.native.kernels`, and their names in the commit's message."""
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
