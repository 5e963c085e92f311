"""Datasets of images in several formats, and input pipelines driven batch by batch."""
