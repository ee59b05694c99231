"""Triton kernels. Importing one imports Triton, so only code that runs on a GPU does; plain PyTorch has the same beside it."""
