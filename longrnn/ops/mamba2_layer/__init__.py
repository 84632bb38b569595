"""Everything between the projections of a Mamba-2 layer."""
