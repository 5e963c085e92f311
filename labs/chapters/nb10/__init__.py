"""What notebook 10 shows: troubleshooting."""
