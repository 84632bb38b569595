"""The short causal convolution before a recurrence."""
