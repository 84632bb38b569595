"""Checkpoints by name: loading, writing, converting and adapters; the embedded ones are beside."""
