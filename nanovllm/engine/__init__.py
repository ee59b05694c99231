"""The control plane: requests, queues and blocks. Nothing but the standard library and xxhash, so it runs anywhere."""
