"""A fleet of engines in virtual time: the engine's own scheduler, and what its steps cost on a card. No torch."""
