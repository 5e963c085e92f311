"""What notebook 10 shows: when training hangs, dies or goes wrong."""
