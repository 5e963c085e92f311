"""What the course promises on a GPU, step by step: what is tried, and when that is a pass."""
