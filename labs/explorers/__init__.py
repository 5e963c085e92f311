"""The notebooks' sliders, one module each."""
