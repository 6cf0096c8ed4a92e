"""Attention kernels for Hopper (sm_90a) in CuTe-DSL."""
