"""Estimate of an ingest's remaining work and duration, including files that are not read yet."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.common.json_text import parsed
from kvtool.core.common.machine import cores, cpu_name
from kvtool.core.corpus.readers import ending_of, is_bounded
from kvtool.core.corpus.walk import FoundFile
from kvtool.core.ingest.ingest_report import Forecast
from kvtool.core.ingest.options import IngestOptions

_SPEED, _FORMAT = "speeds/ingest.json", 1
_FEWEST_TOKENS = 1000  # of a run whose speed is worth remembering
_BYTES_A_TOKEN, _PACKED_BYTES_A_TOKEN = 4.0, 20.0  # of a file; of a PDF or an office document
_WEIGHT = 20_000  # bytes of files that this guess counts for
_LIKELY = 1 << 20  # bytes of a file of an unknown kind that may be text


class Estimate:
    """Tokens of the files that are not read yet, by what those of their ending had that are."""

    def __init__(self, files: Iterable[FoundFile]) -> None:
        self._left = Counter[str]()  # bytes by ending
        self._counted: dict[str, int] = {}
        self._read, self._tokens = Counter[str](), Counter[str]()
        for file in files:
            size = 0 if file.guessed and file.size > _LIKELY else file.size
            self._left[ending_of(file.path)] += size
            self._counted[file.name] = size

    def pass_by(self, name: str) -> bool:
        """Count a file as looked at; False: it is none of these."""
        size = self._counted.pop(name, None)
        self._left[ending_of(Path(name))] -= size or 0
        return size is not None

    def learn(self, name: str, size: int, tokens: int) -> None:
        """Note how many tokens of a file are new."""
        ending = ending_of(Path(name))
        self._read[ending] += size
        self._tokens[ending] += tokens

    @property
    def tokens(self) -> int:
        """About how many tokens are to come."""
        return round(sum(size * self._per_byte(ending) for ending, size in self._left.items() if size > 0))

    def _per_byte(self, ending: str) -> float:
        guess = _PACKED_BYTES_A_TOKEN if is_bounded(Path(f"a{ending}"), 0) else _BYTES_A_TOKEN
        return (self._tokens[ending] + _WEIGHT / guess) / (self._read[ending] + _WEIGHT)


def kv_bytes_a_token(folder: Path, dtype: str) -> int:
    """Return about how many bytes a store keeps of a token of a model; 0 where its config.json does not tell.

    It is read as it stands: what `transformers` makes of it would take torch into a run that computes nothing.
    """
    try:
        config = parsed((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        heads, of_queries = (config.get(name) for name in ("num_key_value_heads", "num_attention_heads"))
        width = config.get("head_dim") or config["hidden_size"] // of_queries
        layers = config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
        return int(2 * layers * (heads or of_queries) * width * (4 if dtype == "float32" else 2))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return 0


def forecast(
    tokens: int, per_token: int, store: Store | None, path: Path, fingerprint: str, options: IngestOptions
) -> Forecast:
    """Make a forecast; `path` is the store's folder, which may not be there yet."""
    speed = _speed(store, fingerprint, options) if store is not None else None
    here = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
    return Forecast(tokens, tokens * per_token, tokens / speed if speed else None, space.disk_free(here), options.level)


def remember_speed(store: Store, fingerprint: str, options: IngestOptions, tokens: int, seconds: float) -> None:
    """Keep the speed of a run for the next one's forecast."""
    if tokens >= _FEWEST_TOKENS and seconds > 0:
        marks = _marks(fingerprint, options)
        store.write_side(_SPEED, {**marks, "tokens_per_second": tokens / seconds})


def _speed(store: Store, fingerprint: str, options: IngestOptions) -> float | None:
    speed = store.read_side(_SPEED, **_marks(fingerprint, options)).get("tokens_per_second")
    return speed if isinstance(speed, float) and speed > 0 else None


def _marks(fingerprint: str, options: IngestOptions) -> dict[str, Any]:
    machine = [platform.node(), cpu_name(), cores()]
    return {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "machine": machine,
        "device": options.device,
        "dtype": options.dtype,
    }
