"""Parse PTX text, and check kernels without running them.

In: PTX text. Out: kernels as basic blocks of decoded instructions (`parser`, `kernel`), and
findings, which are reports of errors (`wgmma_fences`, `cta_groups`).
"""
