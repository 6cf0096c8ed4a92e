"""Define the faults by which the emulator is judged; each is one edit of a correct program.

`programs` and `compiled` define the programs, `faults` lists the faults, and `table` writes the
list to docs/emulator.md.
"""
