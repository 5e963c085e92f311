"""Verdicts on the articles' claims: a module per notebook, with named functions that read the notebook's records.

`python -m labs.claims` prints them all. Some notebooks still have their verdicts in labs/chapters.
"""
