"""Imports of a question from a shell; the modules that it does without can still be imported."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.core.checkpoint import files
from kvtool.core.checkpoint.gguf.convert import converted
from tests.checkpoint.gguf_files import write_gguf
from tests.cli.working import QUESTION, built, corpus, fresh, kvtool, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]

SCRIPT = Path(__file__).parents[2] / "samples" / "benchmarks" / "startup.py"
MOST_MODULES = 2800  # 2,500 when this was written, sympy for an unpacked model among them; 3,300 with all of them
MOST_TO_LOAD = 1800  # 1,600 when this was written: of a model whose weights are packed, without command line and store
READ = {  # files of a converted model that Python opens to load it, and how often
    "config.json": 3,
    "tokenizer.json": 1,
    "tokenizer_config.json": 2,
    "gguf-source.json": 2,
    "generation_config.json": 1,
    "chat_template.jinja": 1,
}
UNUSED = {
    *("scipy", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch._dynamo.symbolic_convert", "transformers.trainer", "transformers.pipelines"),
    *("accelerate.accelerator", "boto3", "jinja2", "pydantic"),
}


def python(*lines: str) -> str:
    """What a process that imports lightly prints."""
    code = "\n".join(("from kvtool.core.model.understudies import Understudy, cast", "cast()", *lines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_question_imports_the_architecture_in_use_and_answers_as_with_all_of_them(store: Path) -> None:
    asked = ["query", QUESTION, "--store", str(store), "--max-tokens", "4", "--json"]
    said = python(
        "import json, os, sys",
        "os._exit = lambda code: print(code, json.dumps(list(sys.modules)))",
        "from kvtool.cli.app import run",
        f"sys.argv[1:] = {asked!r}",
        "run()",
    )
    reply, ended = said.splitlines()
    code, _, modules = ended.partition(" ")
    names = set(json.loads(modules))
    assert code == "0"
    assert UNUSED & names == set()
    models = {name.split(".")[2] for name in names if re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", name)}
    assert models == {"auto", "llama"}
    assert len(names) < MOST_MODULES
    here = kvtool(*asked).json
    assert gc.isenabled()  # only a process of its own is left without
    assert (json.loads(reply)["answer"], json.loads(reply)["tokens"]) == (here["answer"], here["tokens"])


@pytest.mark.slow
def test_a_converted_model_is_neither_hashed_nor_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a library maps, or reads in Rust, are not counted."""
    monkeypatch.setattr(files, "_RACY_SECONDS", -1.0)  # as if it had been converted some time ago
    gguf = write_gguf(tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    folder = converted(gguf)
    said = python(
        "import json, sys",
        "from collections import Counter",
        "opened = Counter()",
        "sys.addaudithook(lambda event, what: opened.update([str(what[0])]) if event == 'open' else None)",
        "from kvtool.core.checkpoint.hub import resolve",
        "from kvtool.core.checkpoint.load import load_model",
        f"load_model(resolve({str(gguf)!r}), device='cpu', packed=True)",
        "print(json.dumps([sorted(sys.modules), opened]))",
    )
    modules, opened = json.loads(said)
    times = {path.name: opened.get(str(path), 0) for path in (gguf, *folder.iterdir())}
    assert times == READ | dict.fromkeys(times.keys() - READ.keys(), 0)
    assert (UNUSED | {"sympy"}).isdisjoint(modules)
    assert len(modules) < MOST_TO_LOAD


@pytest.mark.slow
def test_an_understudy_becomes_the_module_when_it_is_asked_for_more() -> None:
    said = python(
        "import sys",
        "import transformers.modeling_utils as imported",
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM",
        "before = sys.modules['transformers']",
        "light = [name for name, module in sys.modules.items() if isinstance(module, Understudy)]",
        "from transformers import LlamaConfig, Qwen2Config",
        "import transformers",
        "from transformers.processing_utils import ProcessorMixin",
        "import torch, torch._dynamo.utils, torch.distributed.tensor",
        "compiled = torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item()",
        "same = before.Qwen2Config is Qwen2Config is transformers.models.qwen2.Qwen2Config",
        "asked = (transformers, transformers.models, torch._dynamo)",
        "lacks = not any(hasattr(module, 'no_such_name') for module in asked)",
        "print(sorted(light), same, lacks, ProcessorMixin.__module__, compiled)",
    )
    light = [
        *("accelerate", "accelerate.hooks", "accelerate.utils", "accelerate.utils.modeling", "torch._dynamo"),
        *("transformers", "transformers.models", "transformers.processing_utils"),
        "transformers.utils.chat_template_utils",
    ]
    assert said.strip() == f"{light} True True transformers.processing_utils 2.0"


@pytest.mark.slow
def test_a_function_of_an_understudy_is_the_modules_own_when_it_is_called() -> None:
    said = python(
        "import sys, torch, transformers.modeling_utils as imported",
        "from accelerate.utils import get_max_memory",
        "from accelerate.hooks import AlignDevicesHook, add_hook_to_module",
        "before = 'accelerate.accelerator' in sys.modules",
        "hooked = add_hook_to_module(torch.nn.Identity(), AlignDevicesHook())._hf_hook",  # its package comes first
        "same = imported.unwrap_model(model := torch.nn.Identity()) is model",
        "from accelerate import Accelerator, utils",
        "from transformers.utils.chat_template_utils import render_jinja_template",
        "asked = [[{'role': 'user', 'content': 'hi'}]]",
        "text = render_jinja_template(asked, chat_template='{{ messages[0].content }}')[0][0]",
        "same = same and type(hooked) is sys.modules['accelerate.hooks'].AlignDevicesHook",
        "print(before, same, list(get_max_memory()) == list(utils.get_max_memory()), Accelerator.__module__, text)",
    )
    assert said.split() == ["False", "True", "True", "accelerate.accelerator", "hi"]


@pytest.mark.slow
def test_torch_is_told_where_operations_are_declared_without_a_look_at_all_modules() -> None:
    said = python(
        "import inspect",
        "asked, look = [], inspect.getmodule",
        "inspect.getmodule = lambda *what: asked.append(inspect.isframe(what[0])) or look(*what)",
        "import torch",
        "@torch.library.custom_op('tried::twice', mutates_args=())",
        "def twice(x: torch.Tensor) -> torch.Tensor: return x + x",
        "twice.register_fake(torch.empty_like)",
        "place = torch._library.simple_registry.singleton.find('tried::twice').fake_impl.kernels[-1].source",
        "print(any(asked), twice(torch.ones(1)).item(), place)",
    )
    assert said.split() == ["False", "2.0", "<string>:7"]


@pytest.mark.slow
def test_a_process_that_has_torch_already_is_left_alone() -> None:
    said = python("import sys; print(len(sys.meta_path))", "import torch; cast(); print(len(sys.meta_path))")
    first, second = said.split()
    assert first == second


@pytest.mark.slow
def test_the_sample_says_where_a_question_spends_its_time(store: Path) -> None:
    words = [sys.executable, str(SCRIPT), QUESTION, "--store", str(store), "--runs", "1", "--max-tokens", "2"]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[0] for line in (one.strip() for one in done.stdout.splitlines()[1:])]
    expected = ["clock, s", "processor, s", "before it, ms", "import, ms", "load model, ms", "retrieve, ms"]
    assert [*expected, "fuse, ms", "generate, ms", "modules"] == [line for line in lines if line != "read, MB"]


@pytest.mark.slow
def test_the_sample_says_what_a_question_takes_beside_a_server(store: Path) -> None:
    words = [sys.executable, str(SCRIPT), QUESTION, "--store", str(store), "--runs", "1", "--max-tokens", "2"]
    done = subprocess.run([*words, "--server"], capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[0] for line in (one.strip() for one in done.stdout.splitlines()[1:])]
    assert lines == ["clock, s", "first token, s", "the rest, s"]
    assert not Path(f"{store}.sock").exists()
