"""Several models on the same items: suites, tables, costs."""
