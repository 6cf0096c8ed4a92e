"""Attention algorithms with hooks for what a variant adds; one folder per kind of machine.

A template knows tiles, softmax and memory, and nothing of graphs: the score and mask functions
come as hooks. Only `attnkit.splice` binds the two.
"""
