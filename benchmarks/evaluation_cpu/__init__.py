"""What evaluation costs on the CPU."""
