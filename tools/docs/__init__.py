"""The course site and the notebooks."""
