"""Replicas, their gradients' buckets, and the closed forms of data parallelism."""
