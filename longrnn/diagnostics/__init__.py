"""Pictures and reports; the home of matplotlib."""
