"""Kernels by themselves."""
