"""What labs and notebooks share. Import the module you need: this package imports nothing by itself."""
