"""What notebook 11 shows: all claims on trial, votes on them, and twelve ways to fool oneself."""
