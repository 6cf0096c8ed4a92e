"""Predicts time: launches and recorded events come in, clocks of units and timelines go out."""
