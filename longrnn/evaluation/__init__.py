"""Evaluations of language models, with results files that are resumed."""
