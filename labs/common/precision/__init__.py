"""Number formats and training steps in mixed precision."""
