"""`forebay tune`: measures a machine with one of its devices and a model, and says what to set."""
