"""What ingesting many small files costs: peak memory, seconds, files a second.

    python samples/benchmarks/many_files.py FOLDER [--files 100000] [--words 120]

writes that many text files and a tiny random model into FOLDER (kept, and used again by a later run), ingests the files
into a new store with `kvtool ingest` in a process of its own, then once more with nothing changed, and prints a line
each. The model is so small that what is measured is everything but the prefill. To measure another version, put it
first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORDS, FILES_A_FOLDER = 5_000, 1_000
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def words() -> list[str]:
    dice = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    return ["".join(dice.choices(syllables, k=dice.choice((1, 2, 2, 3)))) for _ in range(WORDS)]


def write_files(folder: Path, count: int, length: int) -> None:
    vocabulary = words()
    for number in range(count):
        place = folder / f"{number // FILES_A_FOLDER:04d}"
        place.mkdir(parents=True, exist_ok=True)
        dice = random.Random(number)
        text = f"Note {number}\n\n" + " ".join(dice.choices(vocabulary, k=length)) + ".\n"
        (place / f"{number:07d}.txt").write_text(text, encoding="utf-8")


def write_model(folder: Path, hidden: int = 32, layers: int = 2) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(words())], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def ingest(folder: Path, name: str, count: int) -> None:
    """Ingest in a process of its own, and print what it took."""
    command = [sys.executable, "-P", "-m", "kvtool", "ingest", str(folder / "files"), "--store", str(folder / "store")]
    command += ["--model", str(folder / "model"), "--offline", "--device", "cpu", "--quiet"]
    started, own = time.perf_counter(), 0.0
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"KVTOOL_HOME": str(folder / "home")})
    ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    while not ended:
        own = max(own, own_memory(process.pid))
        time.sleep(0.1)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    if status:
        raise SystemExit("error: kvtool ingest failed")
    seconds, peak = time.perf_counter() - started, usage.ru_maxrss / 1024
    print(
        f"{name}: {count:,} files, {seconds:.1f} s, {count / seconds:.0f} files/s, "
        f"peak {peak:.0f} MiB (ru_maxrss), of that {own:.0f} MiB its own (no mapped files)",
        flush=True,
    )


def own_memory(process: int) -> float:
    """MiB of memory that is no mapped file's: the pages of the store that are mapped can be dropped at any time."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--words", type=int, default=120, help="words in each (default 120)")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if not (folder / "model").exists():
        write_files(folder / "files", given.files, given.words)
        # In a process of its own: a child's peak counts from what its parent held.
        maker = multiprocessing.get_context("spawn").Process(target=write_model, args=(folder / "model",))
        maker.start()
        maker.join()
    shutil.rmtree(folder / "store", ignore_errors=True)
    ingest(folder, "new store", given.files)
    ingest(folder, "nothing changed", given.files)


if __name__ == "__main__":
    main()
