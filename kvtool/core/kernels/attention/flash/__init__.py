"""Attention in own machine code on x86 CPUs: blocks of rows over tiles of keys, softmax as they come."""
