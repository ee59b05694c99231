"""Text: tokenizer and chat template, detokenizer, stop strings. Nothing here imports torch."""
