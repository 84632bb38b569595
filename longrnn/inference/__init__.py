"""Inference with any language model: prefix sharing, completion, scoring, chunk selection."""
