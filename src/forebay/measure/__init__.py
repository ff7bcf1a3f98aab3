"""Measuring primitives: plain copies as a floor, foreign copies timed by the device, movers at full
rate, a model's decode step. Small functions with plain results, for `forebay bench` and others.
"""
