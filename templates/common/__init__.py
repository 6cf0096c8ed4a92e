"""Share code between the sm90 and the sm100 kernels.

This package has the hooks, work tiles, semaphores, the preprocess and the combine kernel.
"""
