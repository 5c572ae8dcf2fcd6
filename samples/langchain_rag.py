"""kvtool as the answering step of a LangChain chain; needs `pip install langchain-core`.

    python samples/langchain_rag.py STORE "Who founded the observatory?"

A chain gets a question, or a question with the documents that a retriever of your own has found. kvtool joins their
stored KV caches instead of reading their texts again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableLambda

import kvtool


def rag(cache: kvtool.Cache, **options: Any) -> Runnable[Any, dict[str, Any]]:
    """Return a runnable that answers as LangChain's retrieval chains do: `input`, `context` and `answer`.

    Its input is a question, or `{"input": question, "context": documents}`; a document's `source` names its file.
    """

    def answer(asked: str | dict[str, Any]) -> dict[str, Any]:
        question = asked if isinstance(asked, str) else asked["input"]
        found = [] if isinstance(asked, str) else asked.get("context", [])
        named = list(dict.fromkeys(document.metadata["source"] for document in found))
        reply = cache.query(question, documents=named, **options)
        context = [
            Document(page_content=chunk.text, metadata={"source": chunk.source, "place": chunk.place})
            for chunk in reply.chunks
        ]
        return {"input": question, "context": context, "answer": reply.answer}

    return RunnableLambda(answer)


def main(store: str | Path, question: str, **options: Any) -> None:
    with kvtool.open(store) as cache:
        chain = rag(cache, top_k=3, **options) | RunnableLambda(
            lambda done: "\n".join([done["answer"], *(f"  {each.metadata['place']}" for each in done["context"])])
        )
        print(chain.invoke(question))


if __name__ == "__main__":
    main(*sys.argv[1:])
