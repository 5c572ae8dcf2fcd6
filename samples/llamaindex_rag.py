"""kvtool as a query engine of LlamaIndex; needs `pip install llama-index-core`.

    python samples/llamaindex_rag.py STORE "Who founded the observatory?"

The engine finds the passages of a store, joins their stored KV caches and answers; the response has them as its source
nodes. What takes a query engine (routers, evaluators, agents' tools) takes this one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llama_index.core.base.response.schema import Response
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field

import kvtool


class KvtoolQueryEngine(CustomQueryEngine):
    """Answers from a store. `options`: of `kvtool query`, such as `fusion` and `top_k`."""

    cache: Any
    options: dict[str, Any] = Field(default_factory=dict)

    def custom_query(self, query_str: str) -> Response:
        reply = self.cache.query(query_str, **self.options)
        nodes = [
            NodeWithScore(
                node=TextNode(id_=chunk.id, text=chunk.text, metadata={"source": chunk.source, "place": chunk.place}),
                score=chunk.score,
            )
            for chunk in reply.chunks
        ]
        return Response(reply.answer, source_nodes=nodes)


def main(store: str | Path, question: str, **options: Any) -> None:
    with kvtool.open(store) as cache:
        response = KvtoolQueryEngine(cache=cache, options={"top_k": 3, **options}).query(question)
    print(response)
    for found in response.source_nodes:
        print(f"  {found.node.metadata['place']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
