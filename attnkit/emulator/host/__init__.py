"""Run the host code of compiled kernels without a GPU.

In: arguments of a call. Out: the kernel launches that the call makes.
"""
