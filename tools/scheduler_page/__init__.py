"""Be the scheduler: one HTML file in which the engine's own scheduler runs in the browser, on the reader's requests."""
