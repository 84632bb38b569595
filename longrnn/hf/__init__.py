"""Loading: checkpoints and tokenizers by name or path, and all that needs `transformers`."""
