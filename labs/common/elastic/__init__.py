"""Training that survives killed ranks: one rank of such a run (`train`), and its resumable training loop (`loop`)."""
