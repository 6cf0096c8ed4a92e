"""Define what the kernels of both architectures share.

Hooks, work tiles, semaphores, the preprocess and the combine kernel.
"""
