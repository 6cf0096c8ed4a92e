"""The faults that the emulator is judged by: each is one edit of a program that has none.

`programs` has the programs, `faults` the list, `table` writes it to docs/emulator.md.
"""
