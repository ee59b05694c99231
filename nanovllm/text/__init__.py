"""Text: tokenizer and chat template, bad words, detokenizer, stop strings. Nothing here imports torch."""
