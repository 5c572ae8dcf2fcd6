"""Fixtures of every test: a home of its own, so that none touches the user's, and no network."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtool.core.common.machine import cores
from tests import tiers
from tests.stores import (  # noqa: F401
    built,
    corpus,
    fitted,
    fitted_store,
    fresh,
    plain,
    plain_store,
    says,
    store,
    tiny,
)

if TYPE_CHECKING:
    from tests.pretended.streams import Log

# A shell starts background jobs with SIGINT ignored, and what ignores it passes that on: Ctrl-C would then be tested in
# processes that cannot hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny matrices take no help, and threads that wait for each other spin on the cores that other workers need. Before
# torch is imported; what is run in threads of its own is tested with as many as the machine has (`room_threads`).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
SEVERAL_THREADS = {"codec", "kernels", "model", "native"}

_session = contextlib.ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", "pretended"),
        help="where the tiny models of laws and fusion run; pretended: as if there were a GPU (tests/pretended)",
    )


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    os.environ["KVTOOL_TEST_DEVICE"] = "cpu" if device == "cpu" else "cuda"
    if device == "pretended":
        from tests.pretended import pretended

        _session.enter_context(pretended())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.assign(items)


def pytest_collectstart() -> None:
    """Look for no garbage among what is imported: that takes a sixth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have no look for garbage go through thousands of tests, and what they import: it takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    _session.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All state under a temporary folder, no setting from outside."""
    for variable in [name for name in os.environ if name.startswith("KVTOOL_") and "_TEST_" not in name]:
        monkeypatch.delenv(variable)
    folder = tmp_path / "home"
    monkeypatch.setenv("KVTOOL_HOME", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    return folder


@pytest.fixture(autouse=True)
def room_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """All cores in the rooms of machine code that divides its work."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in SEVERAL_THREADS:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may set how many torch computes with."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    """Tiny matrices take no help, and a formula's rounding is that of one."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def gpu() -> Iterator[Log]:
    """A GPU that is not there, and the log of what waits for it."""
    from tests.pretended import pretended

    with pretended() as log:
        yield log


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton's kernels run on the CPU."""
    from tests.codec.processes import triton_process

    with triton_process(tmp_path_factory.mktemp("triton"), "1") as process:
        yield process


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[ProcessPoolExecutor]:
    """A process that compiles Triton's kernels for GPUs that need not be here."""
    from tests.codec.processes import triton_process

    if find_spec("triton.backends.nvidia") is None:
        pytest.skip("this triton has no PTX backend")
    with triton_process(tmp_path, "0") as process:
        yield process
