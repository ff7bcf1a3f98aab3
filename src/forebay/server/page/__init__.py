"""The live page's files, as they are served."""
