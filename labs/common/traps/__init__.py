"""What the traps of labs.loader_traps are made of, by subject."""
