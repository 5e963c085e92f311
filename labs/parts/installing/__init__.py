"""How torch gets onto a machine: package indexes to choose from, and what an installed torch brings and loads."""
