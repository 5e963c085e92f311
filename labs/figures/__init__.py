"""What each notebook draws and says of its records: one module per notebook."""
