"""Labs on fast PyTorch training: one module per experiment; what they share is in `labs.kit`."""
