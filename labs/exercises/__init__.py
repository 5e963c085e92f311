"""The exercises: one module per notebook, in the schema of labs.kit.exercise."""
