"""Calls of frameworks of Python: `python suites.py URL KEY MODEL SUITE...`; prints a JSON line for each check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

URL, KEY, MODEL, *SUITES = sys.argv[1:]
QUESTION = "Who built the third mill?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}}
MOST = 100  # tokens


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=4)


def check(suite: str, name: str, run: Callable[[], Any]) -> None:
    try:
        reason = "" if run() else "another result than expected"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
    sys.stdout.write(json.dumps({"suite": suite, "check": name, "reason": reason}) + "\n")


def is_city(arguments: Any) -> bool:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return isinstance(found["city"], str)


def litellm_suite() -> None:
    import litellm

    litellm.suppress_debug_info = True
    for kind, base in (
        ("openai", f"{URL}/v1"),
        ("hosted_vllm", f"{URL}/v1"),
        ("lm_studio", f"{URL}/v1"),
        ("anthropic", URL),
        ("ollama", URL),
        ("ollama_chat", URL),
    ):
        asked = {"model": f"{kind}/{MODEL}", "messages": MESSAGES, "api_base": base, "api_key": KEY, "max_tokens": 20}
        check("LiteLLM", f"{kind} chat", lambda asked=asked: litellm.completion(**asked).choices[0].message.content)
        check(
            "LiteLLM",
            f"{kind} stream",
            lambda asked=asked: [piece.choices[0].delta.content for piece in litellm.completion(**asked, stream=True)],
        )
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": MOST}
    asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, "api_base": f"{URL}/v1", "api_key": KEY} | forced
    check(
        "LiteLLM",
        "openai tool",
        lambda: is_city(litellm.completion(**asked).choices[0].message.tool_calls[0].function.arguments),
    )


def langchain_suite() -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    own: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_tokens": MOST}
    headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
    models: dict[str, Any] = {
        "openai": ChatOpenAI(base_url=f"{URL}/v1", **own),
        "responses": ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **own),
        "anthropic": ChatAnthropic(base_url=URL, **own),
        "ollama": ChatOllama(base_url=URL, model=MODEL, num_predict=MOST, client_kwargs=headers),
    }
    for name, model in models.items():
        check("LangChain", f"{name} invoke", lambda model=model: model.invoke(QUESTION).content)
        check("LangChain", f"{name} stream", lambda model=model: list(model.stream(QUESTION)))
        if name != "ollama":  # whose API forces no call
            bound = model.bind_tools([TOOL], tool_choice="any")
            check("LangChain", f"{name} tool", lambda b=bound: is_city(b.invoke(QUESTION).tool_calls[0]["args"]))
        formed = model.with_structured_output(SCHEMA | {"title": "place"}, method="json_schema")
        check("LangChain", f"{name} schema", lambda formed=formed: is_city(formed.invoke(QUESTION)))


def llama_index_suite() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.ollama import Ollama
    from llama_index.llms.openai_like import OpenAILike

    like = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, max_tokens=20)
    ollama = Ollama(model=MODEL, base_url=URL, request_timeout=120.0, headers={"Authorization": f"Bearer {KEY}"})
    for name, model in (("openai-like", like), ("ollama", ollama)):
        check("llama-index", f"{name} complete", lambda model=model: model.complete(QUESTION).text)
        said = [ChatMessage(role="user", content=QUESTION)]
        check("llama-index", f"{name} chat", lambda model=model, said=said: model.chat(said).message.content)
        check("llama-index", f"{name} stream", lambda model=model, said=said: list(model.stream_chat(said)))


def instructor_suite() -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)
        check(
            "instructor",
            mode.name,
            lambda client=client: client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_model=Place, max_tokens=MOST, max_retries=0
            ),
        )


def pydantic_ai_suite() -> None:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    os.environ["ANTHROPIC_BASE_URL"] = URL
    for name, model in (
        ("chat", OpenAIChatModel(MODEL, provider=openai)),
        ("responses", OpenAIResponsesModel(MODEL, provider=openai)),
        ("anthropic", AnthropicModel(MODEL, provider=AnthropicProvider(api_key=KEY))),
    ):
        plain = Agent(model, model_settings={"max_tokens": 20})
        check("pydantic-ai", name, lambda agent=plain: isinstance(agent.run_sync(QUESTION).output, str))
        placed = Agent(model, output_type=ToolOutput(Place), model_settings={"max_tokens": MOST})
        check("pydantic-ai", f"{name} tool", lambda agent=placed: agent.run_sync(QUESTION).output.city is not None)


if __name__ == "__main__":
    for name in SUITES:
        globals()[f"{name}_suite"]()
