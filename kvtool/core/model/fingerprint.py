"""Which model this is: the same answer wherever its files lie, another one when anything that shapes a KV changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvtool.core.model.digests import file_digest
from kvtool.core.model.files import TOKENIZER_FILES, ModelFiles, Once, read_config, unnoticed, weight_files
from kvtool.core.model.origin import checked_origin

_VERSION = 1
# Who saved the file, where, and how it is to be run: nothing that changes a key or a value.
_VOLATILE = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_commit_hash",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)


def model_fingerprint(files: ModelFiles, dtype: str, once: Once = unnoticed) -> str:
    """SHA-256 (hex) over configuration, weights, tokenizer and the format that keys and values are kept in.

    What computes them is no part of it: a store is the same one on machines of different arithmetic.

    Parameters
    ----------
    dtype : of the keys and values, resolved ("bfloat16", "float32", "float16"), never "auto".
    once : entered while a file of the model is hashed for the first time.

    Raises
    ------
    ModelError : the folder is incomplete; or it was converted from a GGUF file, and is not what was made.
    """
    contents = _converted(files) if files.kind in ("gguf", "packaged") else _contents(files.folder, once)
    identity = {"version": _VERSION, **contents, "dtype": dtype}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _contents(folder: Path, once: Once) -> dict[str, Any]:
    return {
        "config": _lasting(read_config(folder)),
        "weights": {path.name: file_digest(path, once) for path in weight_files(folder)},
        "tokenizer": {name: file_digest(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()},
    }


def _converted(files: ModelFiles) -> dict[str, Any]:
    """What identifies a converted model: its GGUF file's digest, whichever release of a library converted it."""
    origin = checked_origin(files.folder)
    return {"gguf": origin.sha256, "conversion": origin.version}


def _lasting(value: Any) -> Any:
    """The configuration without its volatile keys, at every depth."""
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_lasting(inner) for inner in value]
    return value
