"""Twelve ways to fool yourself: each function measures the fooling way and the honest way, and returns both answers."""
