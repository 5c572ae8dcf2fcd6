"""Machine code made from LLVM IR when it is needed, for the codec's and the model's kernels."""
