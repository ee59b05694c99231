"""The race, its recordings, and the live views."""
