"""Runs the host code of compiled kernels: arguments come in, captured launches go out."""
