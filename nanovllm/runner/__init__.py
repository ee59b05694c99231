"""The data plane of one rank: models, KV cache, rows, and the step that ties them together."""
