"""The ladder: seven stages of one LLM inference engine, each the smallest honest version of one idea."""
