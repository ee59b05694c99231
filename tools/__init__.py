"""What makes the assets, the exercises and the diffs; nothing here is needed to run an engine."""
