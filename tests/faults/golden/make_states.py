"""Writes a store of a tiny recurrent hybrid, its model and its documents into a folder, by the kvtool on the path.

    git worktree add OLD c25fd19 && cd OLD && PYTHONPATH=. python …/make_states.py FOLDER

`states-c25fd19.tar.xz` next to it was made so, locks left out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from tests.families import filled, tiny_tokenizer

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
DOCUMENT = "\n\n".join(f"Part {n} of the mill was built in {1800 + 7 * n} by baker {'ABCDE'[n]}." for n in range(5))


def main(folder: Path) -> None:
    (folder / "corpus").mkdir(parents=True)
    (folder / "corpus/mill.md").write_text(DOCUMENT)
    (folder / "corpus/oven.md").write_text(DOCUMENT.replace("mill", "oven"))
    save(folder / "model")
    store = ("--store", folder / "store")
    kept = ("--chunk-tokens", 48, "--lead-in", "prefix", "--dtype", "float32")
    kvtool("ingest", folder / "corpus", "--model", folder / "model", *store, *kept)
    for mode, document in (("prefix", "mill.md"), ("reuse", "oven.md")):
        kvtool("query", "Who built it?", *store, "--documents", document, "--fusion", mode, "--max-tokens", 4)
    kvtool("store", "compact", *store)


def save(folder: Path) -> None:
    """The model, its numbers few, so that they pack well."""
    torch.manual_seed(0)
    filled(AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SHAPE), dtype=torch.float32)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = {name: torch.round(one * 16) / 16 for name, one in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def kvtool(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "kvtool", *map(str, words)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
