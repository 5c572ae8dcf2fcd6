"""A stock LangChain RAG chain over a running `kvtool serve --learn`; needs `pip install langchain-openai`.

    kvtool serve --learn --model smollm2 &
    KVTOOL_KEY=$(kvtool serve --show-key) python samples/langchain_chat.py samples/corpus "Who founded the observatory?"

The chain does its own retrieval and pastes passages into its messages. Only the address is kvtool's: passages that are
pasted again are learned, and the third question that pastes them reads their KV.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question from these passages.\n\n{context}"), ("human", "{input}")]
)


def chain(folder: Path, passages: int, url: str, key: str, **options: Any) -> Runnable[str, Any]:
    """Return a chain from a question to the model's message. `options`: of `ChatOpenAI`."""
    texts = [part for path in sorted(folder.glob("*.md")) for part in path.read_text("utf-8").split("\n\n")]
    documents = [Document(text) for text in texts if len(text) > 200]

    def found(question: str) -> str:
        words = {*re.findall(r"\w{4,}", question.lower())}
        best = Counter(
            {at: sum(word in one.page_content.lower() for word in words) for at, one in enumerate(documents)}
        )
        return "\n\n".join(documents[at].page_content for at, _ in best.most_common(passages))

    model = ChatOpenAI(model="kvtool", base_url=url, api_key=key, temperature=0, **options)
    inputs = RunnablePassthrough.assign(context=lambda asked: found(asked["input"]))
    return RunnableLambda(lambda question: {"input": question}) | inputs | PROMPT | model


def main(folder: str, question: str, url: str = "http://127.0.0.1:8321/v1", key: str = "", passages: int = 4) -> None:
    asked = chain(Path(folder), passages, url, key or os.environ["KVTOOL_KEY"])
    for number in range(1, 4):
        message = asked.invoke(question)
        usage = message.usage_metadata or {}
        reused = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"{number}. {message.content}\n   {reused} of {usage['input_tokens']} tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:])
