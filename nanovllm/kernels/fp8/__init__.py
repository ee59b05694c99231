"""Linear layers with weights in FP8: `fp8_linear` says which kernel is used when."""
