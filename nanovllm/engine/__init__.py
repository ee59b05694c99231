"""The control plane: requests, queues, blocks and text. Plain Python; nothing here imports torch."""
