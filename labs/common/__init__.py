"""Code that two or more experiments use."""
