"""What notebook 09 shows: profiling."""
