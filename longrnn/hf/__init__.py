"""Hugging Face models as models of longrnn (`hf.foreign`, `hf.hybrid`), and back (`hf.auto`)."""
