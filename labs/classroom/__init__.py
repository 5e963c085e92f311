"""What an instructor runs: preflight, room, seats, slides, agenda."""
