"""Parameters of questions that mean the same in all dialects: one table of what clients send.

`SAMPLING` is done, `IGNORED` concerns only the client, its account or the machine, and `NEUTRAL` is accepted at the
values that change nothing here. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvtool.core.errors import UsageError
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.serve.wire import Refusal, bounded, check_names, taken

_NUMBER = (int, float)
# Name of a request, option of a question, and types.
SAMPLING: dict[str, tuple[str, tuple[type, ...]]] = {
    "max_tokens": ("max_tokens", (int,)),
    "n_predict": ("max_tokens", (int,)),  # of llama.cpp
    "num_predict": ("max_tokens", (int,)),  # of Ollama
    "max_completion_tokens": ("max_tokens", (int,)),  # the newer name of OpenAI's, which wins
    "max_output_tokens": ("max_tokens", (int,)),  # of responses
    "temperature": ("temperature", _NUMBER),
    "top_p": ("top_p", _NUMBER),
    "top_k": ("sampled_tokens", (int,)),
    "min_p": ("min_p", _NUMBER),
    "frequency_penalty": ("frequency_penalty", _NUMBER),
    "presence_penalty": ("presence_penalty", _NUMBER),
    "repeat_penalty": ("repetition_penalty", _NUMBER),  # of llama.cpp and Ollama
    "repetition_penalty": ("repetition_penalty", _NUMBER),  # of vLLM
    "repeat_last_n": ("repeat_last_n", (int,)),
    "min_tokens": ("min_tokens", (int,)),
    "seed": ("seed", (int,)),
}
# Values that set no limit, unless another name of the option does: of llama.cpp and Ollama, and of vLLM.
_UNLIMITED = {("max_tokens", -1): 2**31 - 1, ("max_tokens", -2): 2**31 - 1, ("sampled_tokens", -1): 0}
ENDLESS = "ignore_eos"
USER = ("user", "safety_identifier")  # the older and the newer name of one parameter

IGNORED = (
    # the client and its account
    *("metadata", "store", "service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id", "provider"),
    *("session_id", "chat_id", "id", "caching", "timeout", "moderation"),
    # caches and verbosity of other models
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control", "prediction"),
    *("verbosity", "reasoning", "reasoning_effort", "include_reasoning", "max_tool_calls", "stream_options"),
    # the machine
    *("keep_alive", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram"),
    *("f16_kv", "use_mmap", "use_mlock", "draft_num_predict"),
)
_DISPLAYS: tuple[dict[str, str], ...] = ({}, {"display": "omitted"}, {"display": "summarized"})  # of thinking
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("logprobs", "echo", "raw", "background", "think", "enable_thinking", "use_beam_search"), (False,)),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output", "timings_per_token"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("cache_prompt", "penalize_newline"), (True,)),
    **dict.fromkeys(("top_logprobs", "n_probs", "mirostat"), (0,)),
    **dict.fromkeys(("top_a", "xtc_probability", "dry_multiplier", "dynatemp_range"), (0.0,)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), (1.0,)),
    **dict.fromkeys(("functions", "images", "context", "stop_token_ids", "context_management"), ([],)),
    **dict.fromkeys(("options", "web_search_options"), ({},)),
    **dict.fromkeys(("suffix", "template"), ("",)),
    **dict.fromkeys(("return_progress", "logits_all", "vocab_only", "embedding_only"), (False,)),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "truncation": ("disabled", "auto"),
    "thinking": ({"type": "disabled"}, *({"type": "adaptive"} | each for each in _DISPLAYS)),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"thinking": False}),
}


def check_parameters(value: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    check_names(value, (*known, *IGNORED), NEUTRAL, where)


def checked(option: str, value: Any, name: str) -> Any:
    try:
        return options_of(QueryOptions)[option].accept(bounded(value, name), name)
    except UsageError as error:
        raise Refusal(400, "invalid_request", error.message, error.hint, name) from error


def sampling_options(value: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, (option, kinds) in SAMPLING.items():
        number = taken(value, name, kinds)
        if (option, number) in _UNLIMITED:
            options.setdefault(option, _UNLIMITED[option, number])
        elif number is not None:
            options[option] = checked(option, number % 2**63 if option == "seed" else number, name)
    if taken(value, ENDLESS, bool, False):
        options["min_tokens"] = 2**31 - 1
    if options.get("min_tokens"):
        options["stop_repeats"] = False  # which would end the answer sooner
    return options
