"""Hugging Face models whose Mamba-2 layers are computed by the `Mamba2` mixer of this project."""
