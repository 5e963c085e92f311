"""What activation checkpointing is measured with: live bytes, deep models, their prediction, torch's variants."""
