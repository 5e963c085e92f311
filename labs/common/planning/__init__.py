"""Which way to split a model, by closed forms."""
