"""Memory that grows from step to step: which line made it."""
