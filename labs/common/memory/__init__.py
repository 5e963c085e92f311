"""What a step keeps in memory, and activations that are computed again."""
