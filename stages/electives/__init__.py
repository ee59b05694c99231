"""Chapters beyond the ladder: each stands on stage 5, and on no other elective."""
