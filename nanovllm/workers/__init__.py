"""The processes that run a rank each."""
