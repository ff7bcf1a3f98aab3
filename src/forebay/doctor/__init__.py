"""What will limit Forebay on this machine, and what to do about it.

Reads and changes nothing, needs Python alone, and never fails itself: what cannot be read becomes a
finding.
"""
