"""Compute on vectors of lanes: number formats, arithmetic that numpy lacks, fragment layouts.

A vector of lanes is a numpy array with one element per thread of a gang.
"""
