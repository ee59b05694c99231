"""`nanovllm serve`: an OpenAI-compatible server. Needs the extra `serve` (FastAPI, uvicorn)."""
