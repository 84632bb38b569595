"""Long-context evaluation on a CPU: savings by shared prefixes, and peak memory."""
