"""Analyses that only the project's own studies use."""
