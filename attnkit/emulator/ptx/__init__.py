"""Parse PTX, and check it without running it.

In: text. Out: kernels of decoded instructions, and findings.
"""
