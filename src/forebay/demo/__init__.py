"""The demonstration: conversations of several users over one engine, in several modes."""
