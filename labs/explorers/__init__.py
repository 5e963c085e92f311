"""The sliders of the notebooks: one module each."""
