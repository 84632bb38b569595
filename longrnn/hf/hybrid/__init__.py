"""Hugging Face models whose recurrent layers are computed by the cells of this project."""
