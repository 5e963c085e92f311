"""Models in parts: tensor parallelism by hand and with DTensor, and what a rank sends, by closed form and counted."""
