"""What `samples/benchmarks/gpu.py` measures on the first hour with a GPU, a stage a file."""
