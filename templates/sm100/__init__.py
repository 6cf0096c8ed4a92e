"""Implement attention for Blackwell (sm_100a) in CuTe-DSL: forward, backward, postprocess."""
