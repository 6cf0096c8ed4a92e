"""Predict the time of a kernel.

In: launches and recorded events. Out: clocks of each unit, and timelines.
"""
