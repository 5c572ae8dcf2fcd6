"""A LangChain retriever that searches a running `kvtool serve`; needs `pip install langchain-core`.

    kvtool serve &
    KVTOOL_KEY=$(kvtool serve --show-key) python samples/langchain_retriever.py "Who founded the observatory?"

A chain that pastes the passages into its messages and asks the same server gets them from their stored KV caches.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field


class KvtoolRetriever(BaseRetriever):
    """Passages of a server's store, the best first. `options`: `min_score`, and `source`, a glob of documents."""

    url: str = "http://127.0.0.1:8321/v1"
    key: str
    top_k: int = 5
    options: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        asked = urlencode({"q": query, "top_k": self.top_k, **self.options})
        request = Request(f"{self.url}/search?{asked}", headers={"Authorization": f"Bearer {self.key}"})
        with urlopen(request, timeout=60) as response:
            found = json.load(response)["chunks"]
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
