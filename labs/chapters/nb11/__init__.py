"""What notebook 11 shows: the claims of five articles on trial, and twelve ways to fool yourself."""
