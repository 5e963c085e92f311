"""Benchmark steps, busy-time counters, FLOPs and peaks."""
