"""Keep what an engine tells its listener, in a file and as a page for any browser."""

from nanovllm.trace_view.recording import Recording, page

__all__ = ["Recording", "page"]
