"""What makes the assets, the exercises and the diffs; nothing here is needed to run an engine."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository
