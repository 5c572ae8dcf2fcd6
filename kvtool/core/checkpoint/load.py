"""Loading of a model: device, dtype, tokenizer, weights. Only functions import torch and transformers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.checkpoint.architecture import UnlistedArchitecture, read_architecture
from kvtool.core.checkpoint.files import ModelFiles, read_config, tensor_table, weight_files
from kvtool.core.checkpoint.hub import model_fingerprint
from kvtool.core.checkpoint.support import (
    TextSubmodel,
    check_extent,
    check_laid_out,
    check_supported,
    text_config,
    text_submodel,
)
from kvtool.core.common.collecting import paused_collection, quiet
from kvtool.core.common.machine import INT8, Arithmetic, is_out_of_memory, product_dtype
from kvtool.core.errors import KvtoolError, ModelError, UsageError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATE = "chat_template.jinja"
_UNREAD = ("special_tokens_map.json", "chat_template.json", "additional_chat_templates", "added_tokens.json")
_PATCHED = 100_000  # tokens: transformers corrects larger tokenizers of some families


class Tokenizer:
    """Attributes have the names of those of transformers' tokenizers."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map = backend, special_tokens
        self.chat_template = chat_template
        self.added_tokens_decoder: dict[int, AddedToken] = backend.get_added_tokens_decoder()

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **spaces: bool) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read a folder's tokenizer; None: transformers would change something of it."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file() or any((folder / name).exists() for name in _UNREAD):
        return None
    settings = _settings(folder / "tokenizer_config.json")
    backend = Backend.from_file(str(path))
    special = {name: _content(settings[name]) for name in _NAMED if settings.get(name) is not None}
    template = settings.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        template = (folder / _TEMPLATE).read_text(encoding="utf-8")
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if not (isinstance(template, str | None) and isinstance(others, list | tuple)):
        return None
    if not {*special.values(), *map(_content, others)} <= {name for name, token in added.items() if token.special}:
        return None
    if not all(_is_same(added, stated) for stated in (settings.get("added_tokens_decoder") or {}).values()):
        return None
    begins = backend.encode("a").ids[:1] == [backend.token_to_id(special.get("bos_token", ""))]
    if begins != bool(settings.get("add_bos_token", begins and backend.post_processor is not None)):
        return None
    spaced = settings.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE"
    if spaced or (backend.get_vocab_size() > _PATCHED and "mistral" in str(_settings(folder / "config.json"))):
        return None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, special, template)


def _settings(path: Path) -> dict[str, Any]:
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _is_same(added: Mapping[str, AddedToken], stated: Mapping[str, Any]) -> bool:
    token = added.get(str(stated.get("content")))
    if token is None:
        return False
    return all(bool(stated.get(flag, getattr(token, flag))) == getattr(token, flag) for flag in _FLAGS)


_DTYPES = ("float32", "bfloat16", "float16", INT8)
_SAFETENSORS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
OWN_CODE = "it needs code from its own folder, which kvtool does not run"
_NO_INT8 = "leave --dtype out"
_SMALLER = "close other programs, use a smaller model, or --dtype bfloat16"


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any  # `PreTrainedModel`, in eval mode, no gradients
    tokenizer: Any  # fast tokenizer of `transformers`
    files: ModelFiles
    device: str
    dtype: str  # of its keys and values, resolved: "bfloat16", "float16" or "float32"
    fingerprint: str  # of the weights; empty: not known, so no result of the gate is stored
    load_ms: float  # tokenizer and fingerprint included

    @property
    def arithmetic(self) -> Arithmetic:
        is_int8 = any(getattr(module, "int8", False) for module in self.model.modules())
        dtype = INT8 if is_int8 else str(self.model.dtype).removeprefix("torch.")
        return Arithmetic(dtype, self.device.partition(":")[0])

    @property
    def weights(self) -> str:
        """Formats of its weights in memory: the kinds of packed ones, most bytes first ("q4_1, q8_0"), or a dtype."""
        kinds: dict[str, int] = {}
        for module in self.model.modules():
            if (matrix := getattr(module, "matrix", None)) is not None:
                kinds[matrix.kind] = kinds.get(matrix.kind, 0) + matrix.nbytes
        return ", ".join(sorted(kinds, key=lambda kind: -kinds[kind])) or self.arithmetic.dtype


def resolve_device(device: str) -> str:
    if device == "auto":
        return _best_device()
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UsageError(f"there is no device {device!r}", "auto, cpu, cuda, cuda:N or mps")
    if kind == "cpu":
        return "cpu"
    import torch

    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("there is no mps device here", "use --device cpu or auto")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device {device} here", f"{torch.cuda.device_count()} CUDA devices are visible")
    return device


def _best_device() -> str:
    if platform.system() == "Linux" and not _may_have_gpu():
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _may_have_gpu() -> bool:
    """Look for cheap signs of a GPU on Linux: a build of torch for one, and a driver's device file."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return False
    return any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg"))


def resolve_dtype(dtype: str, device: str, files: ModelFiles) -> str:
    if dtype == INT8:
        _check_int8(device, files)
    return _named_dtype(dtype) if dtype != "auto" else own_dtype(_stored_dtype(files), device)


def _check_int8(device: str, files: ModelFiles) -> None:
    from kvtool.core.native.isa import best_isa, multiplies_int8

    why = "" if device == "cpu" else f"runs on a CPU, and not on {device}"
    if not why and multiplies_int8(best_isa()) is None:
        why = "needs a CPU with AVX2 or, on ARM, dot products"
    if not why and files.gguf is None:
        why = f"multiplies the packed weights of a GGUF file, which {files.ref} is not"
    if why:
        raise UsageError(f"--dtype int8 {why}", _NO_INT8)


def _named_dtype(dtype: str) -> str:
    if dtype not in _DTYPES:
        raise UsageError(f"there is no dtype {dtype!r}", "auto, float32, bfloat16 or float16")
    return dtype


def own_dtype(stored: str, device: str) -> str:
    """Return the dtype that `auto` means for a checkpoint: its own; on a CPU that is slow in it, float32."""
    if stored == "bfloat16" and device.startswith("cuda"):
        import torch

        if torch.cuda.get_device_capability(device) < (8, 0):  # it has no bfloat16
            return "float16"
    return product_dtype(stored, device)


def kept_format(dtype: str, files: ModelFiles) -> str:
    """Return the number format that a new store keeps keys and values in, on any machine, for a dtype or "auto".

    `auto` takes 16 bits a number: float16, with three bits of mantissa more, for a model that was published in it and
    whose numbers fit its range; else bfloat16, since keys of other models may leave that range.
    """
    if dtype != "auto":
        return _named_dtype(dtype)
    return "float16" if _stored_dtype(files) == "float16" else "bfloat16"


def _stored_dtype(files: ModelFiles) -> str:
    config = read_config(files.folder)
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stated in _DTYPES:
        return stated
    kinds = [str(entry.get("dtype")) for entry in tensor_table(weight_files(files.folder)[0]).values()]
    return _SAFETENSORS.get(max(kinds, key=kinds.count, default=""), "float32")


def load_tokenizer(files: ModelFiles) -> Any:
    """Load the model's fast tokenizer; torch is not imported where the folder has a tokenizer.json."""
    with _explained(files):
        if (plain := read_tokenizer(files.folder)) is not None:
            return plain
    with quiet(), _explained(files):
        if (files.folder / "tokenizer.json").is_file():
            from transformers.tokenization_utils_tokenizers import TokenizersBackend as Reader
        else:
            from transformers import AutoTokenizer as Reader
        tokenizer = Reader.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"the tokenizer of {files.ref} has no fast form", "add a tokenizer.json to the model's folder")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


@paused_collection()
def load_model(
    files: ModelFiles,
    *,
    device: str = "auto",
    dtype: str = "auto",
    arithmetic: str | None = None,
    packed: bool = False,
    listed: bool = True,
) -> Loaded:
    """Check a model's files, then load them; without `arithmetic` it computes in its dtype.

    A packed model is only run forward, and often: on a CPU weights of a GGUF file stay as they are in it, and bfloat16
    ones so under float32 arithmetic; for others see `pack_weights`. It is built without transformers if its family is
    listed (`architecture.py`), unless `listed` is False.
    """
    from kvtool.core.kernels.linear.modules import keep_few_kernels

    started = time.perf_counter()
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place, files)
    if kind == INT8:
        kind, arithmetic = "float32", INT8
    keep_few_kernels()
    with _explained(files):
        model = _model(files, place, arithmetic or kind, packed, listed)
    return Loaded(
        model=model,
        tokenizer=load_tokenizer(files),
        files=files,
        device=place,
        dtype=kind,
        fingerprint=model_fingerprint(files, kind),
        load_ms=(time.perf_counter() - started) * 1e3,
    )


def supported_config(files: ModelFiles) -> Any:
    with contextlib.suppress(UnlistedArchitecture):
        config = read_architecture(read_config(files.folder)).config
        if files.gguf is None:
            check_extent(files.folder, config)
        return config
    return text_config(whole_config(files))


def whole_config(files: ModelFiles) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    with quiet(), _explained(files):
        config = AutoConfig.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
        check_supported(config)
        if files.gguf is None:  # else it was checked when the folder was made
            check_extent(files.folder, config)
    return config


def _model(files: ModelFiles, device: str, dtype: str, packed: bool, listed: bool) -> Any:
    from kvtool.core.checkpoint.dense import DenseModel
    from kvtool.core.kernels.linear.modules import pack_weights
    from kvtool.core.native.isa import isa_here

    int8, dtype = dtype == INT8, "float32" if dtype == INT8 else dtype
    stays = packed and device == "cpu" and dtype in ("float32", "bfloat16")
    has_layers = isa_here() is not None if stays else device.startswith("cuda")
    # Gradients need transformers' own forward.
    model = _dense_model(files, dtype, stays, int8) if packed and listed and has_layers else None
    if model is None:
        model = _transformers_model(files, device, dtype, stays, int8)
    if int8 and not any(getattr(module, "int8", False) for module in model.modules()):
        raise UsageError(f"--dtype int8 has no products for the weights of {files.ref} on this CPU", _NO_INT8)
    model = model if stays else model.to(device)
    if packed and not any(hasattr(module, "matrix") for module in model.modules()):
        pack_weights(model)
    if not isinstance(model, DenseModel):
        model.set_attn_implementation(plain_attention(model))
    return model


def _dense_model(files: ModelFiles, dtype: str, stays: bool, int8: bool) -> Any:
    import torch

    from kvtool.core.checkpoint.dense import dense_model

    with contextlib.suppress(UnlistedArchitecture):
        return dense_model(files, getattr(torch, dtype), packed=stays, int8=int8)
    return None


def _transformers_model(files: ModelFiles, device: str, dtype: str, stays: bool, int8: bool) -> Any:
    from kvtool.core.checkpoint.packed import bfloat16_model, gguf_model

    with quiet():
        text = text_submodel(files.folder, whole_config(files))
        if files.gguf is not None:
            return gguf_model(files.gguf, files.folder, text, dtype, packed=stays, int8=int8)
        packed = bfloat16_model(files.folder, text) if stays and dtype == "float32" else None
        return _plain_model(files, text, device, dtype) if packed is None else packed


def _plain_model(files: ModelFiles, text: TextSubmodel, device: str, dtype: str) -> Any:
    import torch

    check_laid_out(files.folder, text)
    model, report = text.kind.from_pretrained(
        str(files.folder),
        config=text.config,
        key_mapping=text.names and text.names.mapping,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,  # unset, transformers would ask on stdin whether to run the folder's code
        attn_implementation="eager",  # config.json could name a kernel to be fetched from a hub
        output_loading_info=True,
    )
    _refuse_gaps(files, report)
    return model.to(device).eval().requires_grad_(False)


def plain_attention(model: Any) -> str:
    return "sdpa" if model._supports_sdpa else "eager"


def _refuse_gaps(files: ModelFiles, report: Any) -> None:
    """Refuse missing weights: `transformers` fills them with random numbers, whose answers are worse than none."""
    gaps = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if gaps:
        raise ModelError(
            f"the weights of {files.ref} do not fit its config.json: {len(gaps)} are missing, first {gaps[0]}",
            "download the model again",
        )


@contextlib.contextmanager
def _explained(files: ModelFiles) -> Iterator[None]:
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise KvtoolError(f"not enough memory to load {files.ref}", _SMALLER) from error
        what = next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            what, hint = OWN_CODE, "use another model"
        else:
            hint = "download the model again, or use another one"
            if files.gguf is not None:
                hint = f"delete {files.folder}; it is made again"
        raise ModelError(f"{files.ref} cannot be loaded: {what}", hint) from error
