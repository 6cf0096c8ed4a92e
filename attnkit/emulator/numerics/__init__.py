"""Compute on vectors of lanes: number formats, arithmetic that numpy lacks, fragment layouts."""
