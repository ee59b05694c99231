"""Per-token building blocks of a transformer. Nothing here knows of sequences, batches or caches."""
