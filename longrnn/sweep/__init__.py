"""Grids of training runs."""
