"""Lay a window over every second layer of a Llama-like model: no windowed model comes from a package index.

    python samples/windowed.py FOLDER OUT [--window 256]

FOLDER is a model as `transformers` saves it (`kvtool` keeps one of each GGUF file under `KVTOOL_CACHE/gguf`); OUT has
its weights and tokenizer and says that they are Ministral's, whose layers are Llama's but for their windows. The model
was not trained so: what it answers is worse, but how far fused caches are from its own full prefill can be measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

LEFT_OUT = ("config.json", "packed.safetensors", "gguf-source.json")  # the last two are of the GGUF file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    config = json.loads((options.folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        parser.error(f"{options.folder} holds no Llama-like model without biases")
    layers = range(config["num_hidden_layers"])
    config |= {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": options.window,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
    }
    options.out.mkdir(parents=True)
    for file in options.folder.iterdir():
        if file.is_file() and file.name not in LEFT_OUT:
            shutil.copy(file, options.out)
    (options.out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
