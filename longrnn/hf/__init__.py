"""Loads checkpoints and tokenizers by name or path; everything that needs `transformers`."""
