"""Pictures of the notebooks and lectures."""
