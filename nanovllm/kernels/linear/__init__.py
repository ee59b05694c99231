"""Linear layers for few tokens: `choice.py` says which kernel is used when."""
