"""Kernels: pure functions of tensors, in machine code, Triton or torch operations. Never imports transformers."""
