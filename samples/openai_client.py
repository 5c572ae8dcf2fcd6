"""Ask a running `kvtool serve` with OpenAI's client, and show what kvtool adds to the answer.

kvtool serve --store STORE &
KVTOOL_KEY=$(kvtool serve --show-key) python samples/openai_client.py "Who founded the observatory?"
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(question: str, url: str = "http://127.0.0.1:8321/v1", key: str = "") -> None:
    client = OpenAI(base_url=url, api_key=key or os.environ["KVTOOL_KEY"])
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model="kvtool",  # whatever model the store has
        messages=messages,
        stream=True,
        extra_body={"kvtool": {"fusion": "union", "top_k": 3}},  # options of `kvtool query`
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if facts := (chunk.model_extra or {}).get("kvtool"):  # with the last chunk
            print()
            for source in facts["sources"]:
                print(f"  {source}")
            print(f"{facts['tokens']['reused']} tokens reused, first token after {facts['timing_ms']['ttft']:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
