"""Attention kernels for Blackwell (sm_100a) in CuTe-DSL: forward, backward and postprocess."""
