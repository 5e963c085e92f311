"""Training that survives: a checkpoint that all ranks write (`shards`), ranks that die and come back (`train`)."""
