"""What labs.memory_remedies is made of, by subject."""
