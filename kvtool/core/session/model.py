"""Model of a store, whose weights are loaded at the first use."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvtool.core.common.machine import Arithmetic, product_dtype, why_float32
from kvtool.core.session.identity import model_files

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.checkpoint.files import ModelFiles
    from kvtool.core.common.types import Warn
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.options import ModelOptions
    from kvtool.core.session.identity import StoreIdentity


class StoreModel:
    """The model of a store; tokenizer and configuration are read without the weights. `decoder`: it is loaded already.
    `gradients`: its weights are not packed for speed. Members raise ModelError and UsageError."""

    def __init__(
        self,
        store: Store,
        identity: StoreIdentity,
        options: ModelOptions,
        warn: Warn,
        decoder: Decoder | None = None,
        gradients: bool = False,
    ) -> None:
        self._store, self._identity, self._options, self._warn = store, identity, options, warn
        self._decoder, self._gradients = decoder, gradients

    @cached_property
    def files(self) -> ModelFiles:
        return model_files(self._identity, self._options, self._store.made_by())

    @property
    def is_loaded(self) -> bool:
        return self._decoder is not None

    @property
    def decoder(self) -> Decoder:
        """Load the model at the first use. KV is stored in the store's number format. The model computes in the format
        that this machine is fast in, unless the user names one."""
        if self._decoder is None:
            self._decoder = self._load()
        return self._decoder

    def _load(self) -> Decoder:
        import torch

        from kvtool.core.checkpoint.load import load_model, resolve_device
        from kvtool.core.model.decoder import Decoder

        device, dtype, arithmetic = resolve_device(self._options.device), self._identity.dtype, self.arithmetic.dtype
        if arithmetic != product_dtype(arithmetic, device):
            self._warn(f"{why_float32(arithmetic)}, and float32 is many times as fast", "leave --dtype out")
        loaded = load_model(self.files, device=device, dtype=dtype, arithmetic=arithmetic, packed=not self._gradients)
        return Decoder(loaded, kv_dtype=getattr(torch, dtype))

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of the model on this machine, loaded or not."""
        if self._decoder is not None:
            return self._decoder.loaded.arithmetic
        from kvtool.core.checkpoint.load import resolve_device, resolve_dtype

        device = resolve_device(self._options.device)
        return Arithmetic(resolve_dtype(self._options.dtype, device, self.files), device.partition(":")[0])

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.checkpoint.load import load_tokenizer

        return load_tokenizer(self.files) if self._decoder is None else self._decoder.loaded.tokenizer

    @cached_property
    def layers(self) -> int:
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.checkpoint.support import kept_layers

        return kept_layers(supported_config(self.files)) if self._decoder is None else self._decoder.stored_layers
