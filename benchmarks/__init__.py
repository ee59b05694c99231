"""Measurements: every contender on the same workload, in processes of its own, written down as JSON."""
