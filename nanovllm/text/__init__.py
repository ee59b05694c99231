"""Text: tokenizer, detokenizer, stop strings."""
