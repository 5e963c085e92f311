"""Published measurements, and runs recorded on GPUs."""
