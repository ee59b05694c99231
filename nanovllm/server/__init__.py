"""`nanovllm serve`: an OpenAI-compatible server over `AsyncLLM`. Needs the extra `serve` (FastAPI, uvicorn)."""
