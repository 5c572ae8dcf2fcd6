"""Parts of `samples/benchmarks/scale.py`: a store of very many chunks, what is done to it, and what that takes."""
