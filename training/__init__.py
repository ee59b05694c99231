"""The story grammar, and the training of the embedded models."""
