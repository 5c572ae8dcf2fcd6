"""kvtool as the answering component of a Haystack pipeline; needs `pip install haystack-ai`.

    python samples/haystack_rag.py STORE "Who founded the observatory?"

The component gets a question, or a question with the documents that a retriever of the pipeline has found (their `meta`
names the file as `source`). kvtool joins their stored KV caches instead of reading their texts again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from haystack import Document, GeneratedAnswer, Pipeline, component

import kvtool


@component
class KvtoolAnswerer:
    """Answers from a store. `options`: of `kvtool query`, such as `fusion` and `top_k`."""

    def __init__(self, cache: kvtool.Cache, **options: Any) -> None:
        self.cache, self.options = cache, options

    @component.output_types(answers=list[GeneratedAnswer])
    def run(self, query: str, documents: list[Document] | None = None) -> dict[str, Any]:
        named = list(dict.fromkeys(document.meta["source"] for document in documents or []))
        reply = self.cache.query(query, documents=named, **self.options)
        found = [
            Document(content=chunk.text, score=chunk.score, meta={"source": chunk.source, "place": chunk.place})
            for chunk in reply.chunks
        ]
        return {"answers": [GeneratedAnswer(data=reply.answer, query=query, documents=found)]}


def main(store: str | Path, question: str, **options: Any) -> None:
    with kvtool.open(store) as cache:
        pipeline = Pipeline()
        pipeline.add_component("answerer", KvtoolAnswerer(cache, top_k=3, **options))
        (answer,) = pipeline.run({"answerer": {"query": question}})["answerer"]["answers"]
    print(answer.data)
    for document in answer.documents:
        print(f"  {document.meta['place']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
