"""Exercises, mutants, progress and the diff of a stage."""
