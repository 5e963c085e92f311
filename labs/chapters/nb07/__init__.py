"""What notebook 07 shows: communication."""
