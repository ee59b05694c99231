"""The engine, beside vLLM."""
