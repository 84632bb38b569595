"""What only the project's own studies use."""
