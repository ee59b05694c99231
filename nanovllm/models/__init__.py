"""Model families and the loader. `load_model` is the way in."""
