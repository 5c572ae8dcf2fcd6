"""Kernels: pure functions of tensors, which know no model."""

import torch

from kvtool.core.native.builder import STORED

# What machine code calls torch's number formats: names of `STORED`.
FORMATS: dict[torch.dtype, str] = {getattr(torch, name): name for name in STORED}
COMPUTED = (torch.float32, torch.bfloat16)  # those in which it computes layers and products
