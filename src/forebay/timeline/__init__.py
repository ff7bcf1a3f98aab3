"""What ran under what: recorded, as a trace and as a picture."""
