"""Training on accelerate: one process or many, resumable bit for bit."""
