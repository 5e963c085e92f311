"""Live bytes of a step, from the allocator."""
