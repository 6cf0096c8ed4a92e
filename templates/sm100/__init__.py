"""Blackwell (sm_100a) kernels in CuTe-DSL."""
