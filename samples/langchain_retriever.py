"""A LangChain retriever that asks a running `kvtool serve`; needs `pip install langchain-core openai`.

    kvtool serve &
    KVTOOL_KEY=$(kvtool serve --show-key) python samples/langchain_retriever.py "Who founded the observatory?"

The server has no address that only searches. So the retriever asks for an answer of one token, which names the passages
that it was given: each search takes as long as a first token. `kvtool search` finds the same without a model.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from openai import OpenAI
from pydantic import Field


class KvtoolRetriever(BaseRetriever):
    """Passages of a server's store, the best first. `options`: of `kvtool query`, such as `source` and `min_score`."""

    url: str = "http://127.0.0.1:8321/v1"
    key: str
    top_k: int = 5
    options: dict[str, Any] = Field(default_factory=dict)

    @cached_property
    def _client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=self.key)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        done = self._client.chat.completions.create(
            model="kvtool",
            messages=[{"role": "user", "content": query}],
            max_tokens=1,
            extra_body={"kvtool": {"top_k": self.top_k, "spot": False, **self.options}},
        )
        found = (done.model_extra or {})["kvtool"]["chunks"][::-1]  # in the prompt the best is last
        found.sort(key=lambda chunk: -(chunk["score"] or 0.0))
        facts = ("id", "source", "line", "label", "score")
        return [
            Document(chunk["text"], id=chunk["id"], metadata={name: chunk[name] for name in facts}) for chunk in found
        ]


def main(question: str, url: str = "http://127.0.0.1:8321/v1", key: str = "", top_k: int = 3) -> None:
    retriever = KvtoolRetriever(url=url, key=key or os.environ["KVTOOL_KEY"], top_k=top_k)
    for document in retriever.invoke(question):
        print(f"{document.metadata['score']:.2f}  {document.metadata['source']}:{document.metadata['line']}")
        print(f"      {' '.join(document.page_content.split())[:200]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
