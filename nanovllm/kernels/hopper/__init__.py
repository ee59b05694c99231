"""Kernels in Gluon that only a Hopper GPU can run. Without this folder everything still works, by other kernels."""
