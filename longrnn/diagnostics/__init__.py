"""Diagnoses of states and gradients, with reports and pictures."""
