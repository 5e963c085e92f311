"""Sharded models: tensor parallelism by hand and FSDP2, and the bytes a rank sends, by closed form and counted."""
