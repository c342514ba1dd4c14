"""A Hugging Face model with schemes inside it."""
