"""Execute the instructions that numpy arithmetic does not cover.

In: a gang of warps and operands; generated code calls the functions by name (`namespace`).
They follow the PTX ISA, and raise `Trap` for what it forbids.
"""
