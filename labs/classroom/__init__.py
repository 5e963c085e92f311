"""What an instructor runs: preflight, room, slides."""
