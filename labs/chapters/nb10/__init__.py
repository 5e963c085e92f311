"""What notebook 10 shows."""
