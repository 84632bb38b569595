"""Measurements of language models, each row written as soon as it is known."""
