"""Other packages, timed where they are installed and where their output is right."""
