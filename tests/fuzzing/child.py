"""A target in a process of its own: ``python -m tests.fuzzing.child TARGET MODULE FOLDER [options of libFuzzer]``.

What Python raises is noted once for each place, and the run continues; a signal, two seconds without an end, or too
much memory ends the process, and libFuzzer leaves the bytes in ``findings``.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path

import atheris  # type: ignore[import-not-found]

from tests.fuzzing import registry


def noting(target: registry.Target, folder: Path) -> registry.Target:
    """Make a target that continues where Python raises, and keep the bytes and the trace of each new place."""

    def run(data: bytes) -> None:
        try:
            target(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            frames = traceback.extract_tb(error.__traceback__)
            last = ([frame for frame in frames if "/kvtool/" in frame.filename] or frames)[-1]
            place = f"{type(error).__name__} {last.filename} {last.name} {last.lineno}"
            path = folder / f"raised-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
            if not path.exists():
                path.write_bytes(data)
                trace = "".join(traceback.format_exception(error))
                path.with_suffix(".txt").write_text(trace, errors="backslashreplace")

    return run


def main(target: str, module: str, folder: Path, options: list[str]) -> None:
    findings, corpus, seeds = (folder / name for name in ("findings", "corpus", "seeds"))
    for each in (findings, corpus, seeds):
        each.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["kvtool"]):
        function, sound = registry.loaded(target, module)
        run = noting(function, findings)
        for seed in sound:  # what functions import is imported, and instrumented, now
            (seeds / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
            run(seed)
    atheris.Setup([sys.argv[0], f"-artifact_prefix={findings}/", *options, str(corpus), str(seeds)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
