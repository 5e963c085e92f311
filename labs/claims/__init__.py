"""Verdicts on the articles' claims, a module per notebook: named functions that read the notebook's records.

`python -m labs.claims` prints all of them. A notebook whose module is not here yet has it in labs/chapters.
"""
