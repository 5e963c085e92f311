"""What experiments are made of, by subject."""
