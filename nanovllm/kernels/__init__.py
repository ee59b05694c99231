"""Triton kernels. Importing one imports Triton, so only code for a GPU does; PyTorch can do all of it elsewhere."""
