"""Memory that grows from step to step, and the line that allocated it."""
