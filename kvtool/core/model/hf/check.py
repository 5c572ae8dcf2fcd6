"""Self-check: whether a model's first layers compute what transformers' own forward computes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.load import whole_config
from kvtool.core.checkpoint.packed import empty_model
from kvtool.core.checkpoint.support import text_submodel
from kvtool.core.common.collecting import quiet
from kvtool.core.common.files import cache_dir, make_folder, replace_file
from kvtool.core.model.forward import Forward, Pass, QueryRows
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.spec import UnsupportedArchitecture, check_trial
from kvtool.core.native.isa import isa_here

Decoder: TypeAlias = Any  # of `decoder.py`, which imports this module
_TOKENS = 8
_PACKAGES = ("kvtool", "torch", "transformers")


def why_not_served(decoder: Decoder) -> str:
    """Return why transformers has to compute a model that was built without it; "" if it need not. The answer for a
    model's files, and for the versions of these packages, is kept in the user's cache."""
    why = stored_check(decoder)
    if why is None:
        why, path = _why_not(decoder), _check_file(decoder)
        with suppress(OSError):  # without a cache it is checked again
            if decoder.loaded.fingerprint:
                make_folder(path.parent)
                replace_file(path, why.encode())  # an empty file would be a passed check
    return why


def stored_check(decoder: Decoder) -> str | None:
    """Return what `why_not_served` has found for a model's files before; None: nothing."""
    if not isinstance(decoder.model, DenseModel):
        return ""
    with suppress(OSError, UnicodeError):
        return _check_file(decoder).read_text(encoding="utf-8") if decoder.loaded.fingerprint else None
    return None


def _check_file(decoder: Decoder) -> Path:
    versions = map(version, _PACKAGES)
    key = [decoder.loaded.fingerprint, str(decoder.loaded.arithmetic), str(isa_here()), *versions]
    return cache_dir() / "checked" / hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]


def _why_not(decoder: Decoder) -> str:
    if isinstance(decoder.forward, HfForward):
        return decoder.forward.why
    with quiet():
        reference = type(decoder)(replace(decoder.loaded, model=_with_weights_of(decoder)))
        try:
            check_forward(decoder, decoder.forward, reference, range(_TOKENS))
        except UnsupportedArchitecture as error:
            return str(error)
    return ""


def _with_weights_of(decoder: Decoder) -> Any:
    """Build transformers' model over the modules of ours, for the layers of the check; its vocabulary is the tokens of
    the check, numbered from 0."""
    files = decoder.loaded.files
    model = empty_model(files.folder, text_submodel(files.folder, whole_config(files)), decoder.dtype)
    layers = _layers_of_each_kind(decoder)
    model.model.layers = model.model.layers[:layers]
    for path, module in decoder.model.named_modules():
        if path.startswith("model.layers.") and int(path.split(".")[2]) >= layers:
            continue
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(path, module)
        elif getattr(module, "weight", None) is not None and not isinstance(module, torch.nn.Embedding):
            model.get_submodule(path).weight = module.weight
    embedding = model.get_input_embeddings()
    rows = decoder.base.embed_tokens(decoder.device_ids(_ids(decoder))).cpu()
    embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
    embedding.padding_idx = None
    moved = model if decoder.device == "cpu" else model.to(decoder.device)  # packed weights stay where they are
    return moved.eval().requires_grad_(False)


def _ids(decoder: Decoder) -> list[int]:
    return [number * (decoder.spec.vocabulary // _TOKENS) for number in range(_TOKENS)]


def _layers_of_each_kind(decoder: Decoder) -> int:
    kinds = [layer.likeness for layer in decoder.spec.layers]
    return 1 + max(map(kinds.index, kinds))


@torch.inference_mode()
def check_forward(
    decoder: Decoder, forward: Forward, reference: Decoder, reference_ids: Sequence[int] | None = None
) -> None:
    """Compare the first layers, one of each kind among them, with those of transformers, over 8 tokens: hidden states,
    logits, keys and values. `reference_ids`: those of the tokens in the reference; None: the same as in the decoder.
    Raises UnsupportedArchitecture."""
    count, precision = _layers_of_each_kind(decoder), getattr(torch, decoder.loaded.arithmetic.dtype)
    tokens, rows = _ids(decoder), QueryRows.of(torch.arange(_TOKENS), decoder.device)
    caches = [stack.filled_cache(_TOKENS) for stack in (decoder, reference)]
    ours, theirs = (
        Pass(decoder.device_ids(ids), rows, rows.places, cache)
        for ids, cache in zip((tokens, reference_ids or tokens), caches, strict=True)
    )
    outputs: list[torch.Tensor] = []  # of the layers: the last norm hides a factor of theirs
    hook = reference.base.norm.register_forward_pre_hook(lambda module, given: outputs.append(given[0][0, -1:]))
    whole = reference.base.layers
    reference.base.layers = whole[:count]
    try:
        expected = HfForward(reference, "").logits(theirs, 1)
    finally:
        reference.base.layers = whole
        hook.remove()
    try:
        output = replace(forward, layers=forward.layers[:count]).hidden(ours, 1)
        assert output is not None
        check_trial(output, outputs[0], precision, count)
        check_trial(forward.ends.logits(output), expected, precision, count)
    except (AttributeError, ValueError, RuntimeError, TypeError) as error:
        raise UnsupportedArchitecture(str(error)) from error
    for number, (buffer, other) in enumerate(zip(*(cache.buffers[:count] for cache in caches), strict=True)):
        for side, expected in zip(buffer.view(), other.view(), strict=True):
            check_trial(side, expected, precision, number + 1)
