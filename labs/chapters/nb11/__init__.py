"""What notebook 11 shows: the articles' claims on trial, and ways to fool oneself with a measurement."""
