"""Comparison of models on the same items: suites, tables, costs."""
