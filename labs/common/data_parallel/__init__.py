"""Data parallelism: replicas, gradient buckets, and closed-form costs."""
