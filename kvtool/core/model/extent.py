"""How much a configuration describes, beside what the weights hold: more is refused before it is laid out in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from kvtool.core.errors import ModelError
from kvtool.core.model.files import tensor_table, weight_files
from kvtool.core.model.text import Part, text_part

_WIDE = ("vocab_size", "intermediate_size", "moe_intermediate_size")  # rows or columns of a matrix of hidden states
_MANY = ("num_experts", "num_local_experts", "n_routed_experts")  # that have such a matrix each
_IN_A_BYTE = 8  # weights that a packed integer may hold


def check_extent(folder: Path, config: Any) -> None:
    """Refuse a configuration of more layers, tokens, experts or columns than the weights could be of.

    Parameters
    ----------
    config : the checkpoint's, supported; of a multimodal model its text model's numbers count.

    Raises
    ------
    ModelError
    """
    text, tables = text_part(config), _tables(folder)
    held, width = _elements(tables), max(1, _number(text, "hidden_size"))
    described = {name: (_number(text, name) * width, held) for name in (*_WIDE, *_MANY)}
    described["num_hidden_layers"] = _number(text, "num_hidden_layers"), len(tables)
    for name, (wanted, most) in described.items():
        if wanted > most:
            raise _too_large(folder, f"{name} = {_number(text, name):,}")


def check_laid_out(folder: Path, part: Part) -> None:
    """Refuse a model far larger than its files, which would be filled with random numbers before anybody is told.

    It is laid out without memory. One that lacks some weights is left to the loader, which names them.

    Raises
    ------
    ModelError
    """
    import torch

    with torch.device("meta"):
        empty = part.empty(torch.bfloat16)
    wanted = sum(weights.numel() for weights in {id(one): one for one in empty.parameters()}.values())
    if wanted > 2 * _elements(_tables(folder)):
        raise _too_large(folder, f"{wanted:,} weights")


def _number(config: Any, name: str) -> int:
    """A number of the configuration, the largest of several; 0 where it says none. Raises ModelError."""
    value = getattr(config, name, None) or 0
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ModelError(f"config.json asks for {name} = {str(value)[:80]}", "download the model again")
    return max(numbers)


def _tables(folder: Path) -> list[Mapping[str, Any]]:
    return [entry for path in weight_files(folder) for entry in tensor_table(path).values()]


def _elements(tables: Iterable[Mapping[str, Any]]) -> int:
    """How many weights the files can hold at most."""
    return sum(prod(entry["shape"]) * (1 if "F" in entry["dtype"] else _IN_A_BYTE) for entry in tables)


def _too_large(folder: Path, what: str) -> ModelError:
    return ModelError(f"{folder} describes a larger model than its weights are: {what}", "download the model again")
