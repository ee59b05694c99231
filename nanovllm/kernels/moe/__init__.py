"""Kernels for mixtures of experts, in the order of a layer: `route`, `sort_pairs`, `grouped_mlp`, `sum_pairs`."""
