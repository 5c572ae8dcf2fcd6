"""Requests of all dialects: the models that check them, and the request that the engine answers.

A dialect has a model for each endpoint. Null is a field that is left out. `IGNORED` concerns only the client, its
account or the machine, and `NEUTRAL` is accepted at the values that change nothing here; any other field is refused.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic import ValidationInfo as Info
from pydantic_core import PydanticCustomError

from kvtool.core.common.validation import complaint_of
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.model.options import SamplingOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.serve.wire import LONGEST_NAME, LONGEST_TEXT, MOST_NAMES, Refusal, parsed_json

IGNORED = frozenset(
    # the client and its account
    "metadata store service_tier speed inference_geo user_profile_id workspace_id provider session_id chat_id id "
    "caching timeout moderation "
    # caches and verbosity of other models
    "prompt_cache_key prompt_cache_retention prompt_cache_options cache_control prediction verbosity reasoning "
    "reasoning_effort include_reasoning max_tool_calls stream_options "
    # the machine
    "keep_alive num_ctx num_batch num_gpu main_gpu num_thread num_keep numa low_vram f16_kv use_mmap use_mlock "
    "draft_num_predict".split()
)
_ADAPTIVE = tuple({"type": "adaptive", "display": display} for display in ("omitted", "summarized"))
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n best_of", (1,)),
    ("top_logprobs n_probs mirostat", (0,)),
    ("top_a xtc_probability dry_multiplier dynatemp_range", (0.0,)),
    ("length_penalty typical_p tfs_z", (1.0,)),
    ("suffix template", ("",)),
    ("functions images context stop_token_ids context_management", ([],)),
    ("options web_search_options", ({},)),
    ("logprobs echo raw background think enable_thinking use_beam_search continue_final_message", (False,)),
    ("include_stop_str_in_output timings_per_token return_progress logits_all vocab_only embedding_only", (False,)),
    ("add_generation_prompt skip_special_tokens spaces_between_special_tokens", (True,)),
    ("cache_prompt penalize_newline", (True,)),
    ("function_call", ("none", "auto")),
    ("modalities", (["text"],)),
    ("truncation", ("disabled", "auto")),
    ("thinking", ({"type": "disabled"}, {"type": "adaptive"}, *_ADAPTIVE)),
    ("chat_template_kwargs", ({}, {"enable_thinking": False}, {"thinking": False})),
)
NEUTRAL = {name: values for names, values in _NEUTRAL for name in names.split()}


def invalid(code: str, message: str, hint: str = "") -> PydanticCustomError:
    """Make an error that a validator raises; `{name}` in its message is the parameter's name."""
    return PydanticCustomError(code, message, {"hint": hint})


class Part(BaseModel):
    """An object within a request, which may have further fields."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate({**value})
        except ValidationError as error:
            complaint = complaint_of(error)
        code, path, message, hint = complaint.code, complaint.path, complaint.message, complaint.hint
        if code == "unknown_parameter":
            parent, _, name = path.rpartition(".")
            known = {"": cls.model_fields, "kvtool": KvtoolOptions.model_fields}.get(parent, {})
            hint = did_you_mean(name, known) or (f"known: {', '.join(known)}" if parent == "kvtool" else "")
            if name in NEUTRAL and parent in ("", "options"):
                code, message = "unsupported", f"{path} cannot be {reprlib.repr(complaint.value)}"
                hint = f"leave it out, or send {NEUTRAL[name][0]!r}"
        raise Refusal(400, code, message, hint, path or None)


class StrictPart(Part):
    model_config = ConfigDict(extra="forbid")


class Body(StrictPart):
    """A request, or an object of options, which clients fill by habit."""

    @model_validator(mode="before")
    @classmethod
    def _without_habits(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name in cls.model_fields or not _is_habit(name, each)}


def _is_habit(name: str, value: Any) -> bool:
    neutral = NEUTRAL.get(name, ())
    return name in IGNORED or any(
        isinstance(value, bool) is isinstance(each, bool) and value == each for each in neutral
    )


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def number_of(text: str) -> Any:
    """Return a number of a query string; what is none, as it is."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Names = Annotated[list[Name], BeforeValidator(as_list), Field(max_length=MOST_NAMES)]
Stops = Annotated[list[Annotated[str, Field(max_length=1000)]], BeforeValidator(as_list), Field(max_length=16)]
MOST_MESSAGES = 4096
Messages = Field(max_length=MOST_MESSAGES)
"""Limit of a list of messages."""

# ---- options ----

_UNLIMITED = 2**31 - 1
_MAX_LIST = 32_768  # characters of an option's values: globs are compiled, at some 30 μs a character


def _limits(option: str) -> Any:
    """Make a field with the limits of an option of `kvtool query`."""
    declared = options_of(SamplingOptions)[option]
    return Field(None, ge=declared.lowest, le=declared.highest, json_schema_extra={"option": option})


# -1 sets no limit with llama.cpp and Ollama, nor does -2.
_Length = Annotated[int, BeforeValidator(lambda count: _UNLIMITED if count in (-1, -2) else count)]
_Count = Annotated[int, BeforeValidator(lambda count: 0 if count == -1 else count)]  # of vLLM
_Seed = Annotated[int, BeforeValidator(lambda seed: seed % 2**63 if type(seed) is int else seed)]


class Sampling(Body):
    """How tokens are chosen. Of several names of an option the last one wins, unless it sets no limit."""

    max_tokens: _Length | None = _limits("max_tokens")
    n_predict: _Length | None = _limits("max_tokens")  # of llama.cpp
    num_predict: _Length | None = _limits("max_tokens")  # of Ollama
    max_completion_tokens: _Length | None = _limits("max_tokens")  # the newer name of OpenAI's
    max_output_tokens: _Length | None = _limits("max_tokens")  # of responses
    temperature: float | None = _limits("temperature")
    top_p: float | None = _limits("top_p")
    top_k: _Count | None = _limits("sampled_tokens")
    min_p: float | None = _limits("min_p")
    frequency_penalty: float | None = _limits("frequency_penalty")
    presence_penalty: float | None = _limits("presence_penalty")
    repeat_penalty: float | None = _limits("repetition_penalty")  # of llama.cpp and Ollama
    repetition_penalty: float | None = _limits("repetition_penalty")  # of vLLM
    repeat_last_n: int | None = _limits("repeat_last_n")
    min_tokens: int | None = _limits("min_tokens")
    seed: _Seed | None = _limits("seed")
    ignore_eos: bool = False

    def sampling(self) -> dict[str, Any]:
        """Return the options of a question that are given."""
        given: dict[str, Any] = {}
        for name, option in SAMPLING.items():
            value = getattr(self, name)
            if value is not None and (value != _UNLIMITED or option not in given):
                given[option] = value
        if self.ignore_eos:
            given["min_tokens"] = _UNLIMITED
        if given.get("min_tokens"):
            given["stop_repeats"] = False  # which would end the answer sooner
        return given


SAMPLING: dict[str, str] = {
    name: str(field.json_schema_extra["option"])
    for name, field in Sampling.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
}
"""Option of a question, by the name of its parameter."""


def _accept(value: Any, info: Info) -> Any:
    name = str(info.field_name)
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if len(texts) > MOST_NAMES:
        raise invalid("too_many", f"{{name}} has {len(texts):,} values", f"at most {MOST_NAMES:,}")
    if max(map(len, texts), default=0) > LONGEST_NAME or sum(map(len, texts)) > _MAX_LIST:
        raise invalid("too_long", f"{{name}} has {sum(map(len, texts)):,} characters", f"at most {LONGEST_NAME:,}")
    try:
        return options_of(QueryOptions)[name].accept(value, name)
    except UsageError as error:
        raise invalid("wrong_value", error.message.replace(name, "{name}", 1), error.hint) from error


Option = Annotated[Any, AfterValidator(_accept)]


class _KvtoolFields(StrictPart):
    documents: Names = []
    chunks: Names = []
    spot: bool = True
    strict: bool | None = None

    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, exclude={"documents", "chunks", "spot", "strict"})


# Options of a question that clients may set. None names a file or a model of this machine.
_OPTIONS: dict[str, Any] = dict.fromkeys(
    "fusion ratio link_tokens link shift level max_loss top_k source retriever order min_score stop_repeats cite "
    "verify explain defer defer_first defer_threshold slo_ms".split(),
    (Option, None),
)
_Fields: Any = create_model("_Fields", __base__=_KvtoolFields, **_OPTIONS)


class KvtoolOptions(_Fields):
    """The field `kvtool`."""


# ---- texts, tools and schemas ----

# Kinds of content by the types that the dialects have for its parts.
_KINDS_OF = {"image": "images", "audio": "audio", "file": "files", "document": "files", "video": "video"}


def _text_of(content: Any) -> str:
    """Return the text of a content, whose parts become lines."""
    words = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise no_text(kind)
        words.append(text)
    return "\n".join(words)


def no_text(kind: str) -> PydanticCustomError:
    what = next((each for word, each in _KINDS_OF.items() if word in kind), "")
    return invalid("unsupported", f"{{name}}: {what} are not supported" if what else "{name} is not text", "send text")


Content = Annotated[str, BeforeValidator(_text_of), Field(max_length=LONGEST_TEXT)]
_MOST_JSON = 1 << 16  # characters of a schema, or of all tools


def _short_json(value: Any) -> Any:
    if (length := len(json.dumps(value, ensure_ascii=False, default=BaseModel.model_dump))) > _MOST_JSON:
        raise invalid("too_long", f"{{name}} has {length:,} characters of JSON", f"at most {_MOST_JSON:,}")
    return value


def _schema_of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise invalid("unsupported", "{name} is not a schema of an object", 'give it the type "object"')
    return schema or {"type": "object", "properties": {}, "additionalProperties": False}


Parameters = Annotated[dict[str, Any], Field(validate_default=True), AfterValidator(_schema_of_object)]
Schema = Annotated[dict[str, Any], AfterValidator(_short_json)]
ToolList = Field(max_length=128)
ShortJson = AfterValidator(_short_json)


class Function(StrictPart):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=_MOST_JSON)] = ""
    parameters: Parameters = {}
    strict: Any = None


class FunctionTool(Part):
    """A tool of OpenAI's chat and of Ollama."""

    type: Literal["function"]
    function: Function


def _flattened(value: Any, *names: str) -> Any:
    """Return an object with the members of the one that it has at one of these names: dialects differ in that."""
    inner = [value[name] for name in names if isinstance(value.get(name), dict)] if isinstance(value, dict) else []
    return {**inner[0], **value} if inner else value


class _NamedTool(Part):
    type: Literal["function"]
    name: Name

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return _flattened(value, "function")


class ToolChoice(Part):
    type: Literal["auto", "none", "required", "function", "allowed_tools"]
    name: Name = ""  # of a function
    mode: Literal["auto", "none", "required"] = "auto"  # of allowed tools
    tools: Annotated[list[_NamedTool], ToolList] = []

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else _flattened(value, "function", "allowed_tools")


class Format(Part):
    """A form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = Field(None, alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return _flattened(value, "json_schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("missing", "{name} has no `schema`")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return None if self.type == "text" else self.json_schema or {"type": "object"}


def _arguments_of(given: Any) -> Any:
    """Return arguments, which are an object or its JSON; of invalid JSON, as of a call that was cut off, none."""
    try:
        return parsed_json(given) if isinstance(given, str) else given
    except ValueError:
        return {}


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments_of)]


class SentCall(Part):
    name: Name
    arguments: Arguments


class SentToolCall(Part):
    function: SentCall
