"""Photos, paths, and loaders driven batch by batch."""
