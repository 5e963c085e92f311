"""Loaders that run out of memory or shared memory, for labs.oom_clinic."""
