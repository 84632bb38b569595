"""Long-context evaluation on a CPU: what is shared is not computed twice, and memory stays flat."""
