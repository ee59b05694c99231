"""The decoder, the model families, and the loader: start at `loader.load_model`."""
