"""Predict the time of a kernel in clocks.

In: counts and recorded events of a launch. Out: clocks of each unit of an SM, and timelines.
"""
