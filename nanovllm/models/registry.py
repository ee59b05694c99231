"""The model families by the `model_type` of their config.json. A new one is a file and a line here."""

from nanovllm.models.llama import llama
from nanovllm.models.qwen2 import qwen2
from nanovllm.models.qwen3 import qwen3
from nanovllm.models.variant import ReadVariant

FAMILIES: dict[str, ReadVariant] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
