"""Compile for an emulated machine outside of it: the same LLVM and the same target without the emulator's factor of 20.

In the emulated pytest (`-p arm_compiler`) code that is not kept yet is asked for in the folder `/opt/code`; outside,
`python arm_compiler.py FOLDER` compiles what is asked for until it is ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ASKED = Path("/opt/code")
PATIENCE = 600  # seconds


def ask_outside() -> None:
    """Have `kvtool.core.native.jit` take its code from outside."""
    from kvtool.core.native import jit

    parts_of: dict[str, tuple[str, ...]] = {}
    key_of, kept_code = jit.key_of, jit.kept_code

    def noted(*parts: str) -> str:
        key = key_of(*parts)
        parts_of[key] = parts
        return key

    def asked(key: str) -> bytes | None:
        code = kept_code(key)
        if code is not None or key not in parts_of:
            return code
        write_whole(ASKED / f"{key}.json", json.dumps(parts_of[key]).encode())
        made, until = ASKED / f"{key}.o", time.monotonic() + PATIENCE
        while not made.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return made.read_bytes() or None if made.exists() else None

    jit.key_of, jit.kept_code = noted, asked


def compile_what_is_asked(folder: Path) -> None:
    """Compile every text that is asked for; an empty file means that LLVM refuses it, and the emulated one says why."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    while True:
        for path in sorted(folder.glob("*.json")):
            _, _, optimisation, triple, cpu, features, text = json.loads(path.read_bytes())
            target = llvm.Target.from_triple(triple)
            machine = target.create_target_machine(cpu=cpu, features=features, opt=int(optimisation))
            try:
                code = machine.emit_object(llvm.parse_assembly(text))
            except RuntimeError:
                code = b""
            write_whole(path.with_suffix(".o"), code)
            path.unlink()
        time.sleep(0.05)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that nobody reads a part of it."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


if __name__ == "__main__":
    compile_what_is_asked(Path(sys.argv[1]))
else:
    ask_outside()
