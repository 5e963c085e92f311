"""What notebook 08 shows: scaling out."""
