"""The stages, beside each other and Hugging Face."""
