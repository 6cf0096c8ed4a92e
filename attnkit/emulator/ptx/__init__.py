"""Reads PTX: text comes in, kernels of decoded instructions and static findings go out."""
