"""Executes the instructions that numpy arithmetic does not cover: functions of a gang of warps.

Generated code calls them by name (`namespace`). They follow the PTX ISA, and raise `Trap`.
"""
