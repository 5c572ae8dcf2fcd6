"""Questions under an objective to a store behind a slow link: each in a new process, with nothing of the store here.

    .venv/bin/python samples/slow_link.py --store STORE --slo-ms 2500 1800 --runs 6 [--fault cut|crawl]

The store (compressed to levels 1 to 4) is pushed to a Redis of the script's own; the link is the tests' proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.remote.serving import Link, RedisServer

QUESTION = "What is the larger reflector at the Kellhaven Observatory?"
FAULT_AFTER = 800_000  # bytes
KVTOOL = [sys.executable, "-P", "-m", "kvtool"]  # -P: nothing in the working directory is run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--slo-ms", type=int, nargs="+", default=[2500])
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--mbps", type=float, default=40.0)
    parser.add_argument("--fault", choices=("cut", "crawl"), help=f"after {FAULT_AFTER / 1e6} MB of records")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        try:
            run(given, server, Path(folder))
        finally:
            server.kill()
    return 0


def run(given: argparse.Namespace, server: RedisServer, folder: Path) -> None:
    """Push, measure the machine once, then ask."""
    subprocess.run([*KVTOOL, "store", "push", server.url, "--store", given.store], check=True)
    speeds = folder / "speeds"
    for number, objective in enumerate([60_000, *(one for one in given.slo_ms for _ in range(given.runs))]):
        with closing(Link(server.port, rate=given.mbps * 1e6 / 8)) as link:
            home = folder / "home"
            shutil.rmtree(home / "cache" / "remote", ignore_errors=True)
            full = ask(given, home, link, "--fusion", "full")  # what describes the store is here after this
            (local,) = (home / "cache" / "remote").iterdir()
            if number:
                shutil.copytree(speeds, local / "speeds")
                if given.fault == "cut":
                    link.after(FAULT_AFTER, link.close)
                elif given.fault == "crawl":
                    link.after(FAULT_AFTER, link.crawl)
            done = ask(given, home, link, "--slo-ms", objective, "--max-loss", "0.2", "--remote-timeout", "1")
            if not number:
                shutil.copytree(local / "speeds", speeds)
                continue
        levels = [row["level"] or "text" for row in {row["chunk"]: row for row in done["stream"]}.values()]
        print(
            f"objective {objective:5} ms: first token {done['timing_ms']['ttft']:5.0f} ms, full "
            f"{full['timing_ms']['ttft']:5.0f} ms; last asked for, by chunk: {' '.join(levels)}",
            flush=True,
        )


def ask(given: argparse.Namespace, home: Path, link: Link, *more: object) -> Any:
    """The reply's JSON."""
    command = [*KVTOOL, "query", given.question, "--store", link.url, "--json", "--max-tokens", "2", *map(str, more)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"KVTOOL_HOME": str(home)})
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
