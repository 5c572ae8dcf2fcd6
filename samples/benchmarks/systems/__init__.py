"""kvtool against what a user would pick instead: llama.cpp and plain transformers, each in a process of its own."""
