"""What notebook 11 shows: claims on trial, and ways to fool yourself."""
