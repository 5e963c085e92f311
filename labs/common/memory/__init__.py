"""What a step keeps in memory, and recomputed activations."""
