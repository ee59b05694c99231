"""Linear layers for few tokens."""
