"""What the machine gives this process: readers of /proc and /sys, light and without side effects.

Every reader takes a `Tree`, so that tests can hand it the files of another machine.
"""
