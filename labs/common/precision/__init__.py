"""Number formats, the step in mixed precision, and what a format does to a model."""
