"""A cost model of training on several GPUs: bytes, seconds by one formula, and its error on published runs.

`jobs`: the model to train, and the ways to split it. `memory`: bytes per GPU. `cards`: real cards and their links, from
labs/kit/gpus.toml. `seconds`: time per step. `published`: calibrates the model, tests it on published runs, and gives
each regime its error band. `choose`: every plan with its cost, the best one that fits, and the same for a grid of
models and cards. `waiting`: how long the slowest of n ranks takes.
"""
