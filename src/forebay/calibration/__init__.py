"""What was measured of a machine and one of its devices, and what follows from it.

`forebay tune` measures and writes; the engine, and whoever plans without a machine, read.
"""
