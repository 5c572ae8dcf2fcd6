"""Steps as a CUDA graph: a step's many small kernels are launched by one call, without Python between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtool.core.model.stepping.plain import TorchStepper
from kvtool.core.model.stepping.static import StaticStep

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache

# Steps before the capture: they make what libraries make at their first call, which a capture must not contain. A
# capture takes about as long as two steps and is repaid after a few; an answer of two tokens needs none.
_WARM_UP = 2


class CudaGraphStepper:
    """Steps by replaying a graph that was captured at the third one; by the model's own forward where that fails.

    The capture is of this thread alone: another one may use the device meanwhile.

    Attributes
    ----------
    why : the reason, where a graph could not be captured.
    """

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._plain = TorchStepper(decoder, cache)
        self._step: StaticStep | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0, dtype=torch.float32)
        self._warm = 0
        self.why = ""

    @property
    def name(self) -> str:
        return "torch" if self.why else "cuda graph"

    def step(self, token: int) -> torch.Tensor:
        """Append one token; float32 `[vocabulary]`, overwritten by the next step."""
        if self.why:
            return self._plain.step(token)
        step = self._standing()
        if self._graph is None and self._warm >= _WARM_UP and not self._capture(step):
            return self._plain.step(token)
        step.give(token)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._logits = step.run()
            self._warm += 1
        self._cache.set_length(self._cache.buffers[0].length + 1)
        return self._logits

    def _standing(self) -> StaticStep:
        """The step over the cache as it is: another one when it has grown out of its buffers."""
        if self._step is None or not self._step.stands:
            for buffer in self._cache.buffers:
                buffer.reserve(buffer.length + 1)
            self._step, self._graph, self._warm = StaticStep(self._decoder, self._cache), None, 0
        return self._step

    def _capture(self, step: StaticStep) -> bool:
        """Record the kernels of one step, of which none runs; False, and the reason kept, where that cannot be done."""
        device = torch.device(self._decoder.device)
        graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        beside.wait_stream(current)
        try:
            with torch.cuda.stream(beside):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = step.run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.why = f"no CUDA graph: {next(iter(str(error).splitlines()), '')[:200]}"
            return False
        current.wait_stream(beside)
        self._graph, self._logits = graph, logits
        return True
