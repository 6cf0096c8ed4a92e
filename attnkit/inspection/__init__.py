"""Show what attnkit makes of a variant: formulas, tiles, schedules, predicted time, pictures.

In: a `Variant` and lengths. Out: text, tables and figures. Nothing that computes attention imports
this room; `cli` does.
"""
