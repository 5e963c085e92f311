"""What others have measured and published."""
