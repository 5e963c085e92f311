"""Tiny labs that the tests launch by their full name, as an engineer launches a lab of their own."""
