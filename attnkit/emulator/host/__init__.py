"""Run the host code of compiled kernels.

In: arguments of a call. Out: the launches that the call makes.
"""
