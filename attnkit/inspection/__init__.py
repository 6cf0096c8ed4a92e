"""Show what a variant means and what it costs: formulas, tiles, schedules, predictions, pictures.

In: a `Variant` and lengths. Out: text, tables and figures. `explain.explain` is the entry point;
`picture` draws masks and `timeline` draws schedules. Nothing that computes attention imports this
room; `cli` imports it.
"""
