"""Benchmark loops, streams of work, counters of busy time, FLOPs and peaks."""
