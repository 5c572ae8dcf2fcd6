"""The demo of `make demo`."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[2] / "samples" / "demo.py"


def test_an_interrupted_demo_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupt)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DEMO), run_name="__main__")
    assert ended.value.code == 130
