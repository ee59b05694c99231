"""Lectures: slides, scripts, exercises."""
