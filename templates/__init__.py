"""Attention kernels for each architecture, with hooks where a variant inserts its code.

A template defines tiles, softmax and memory movement. It does not know about graphs: it receives
the score and mask functions as hooks. Only `attnkit.splice` connects graphs to templates.
"""
