"""What a profiler's trace says of training steps."""
