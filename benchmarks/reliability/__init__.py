"""What is left of a run after a kill, a damaged file, a full disk or a rank that does not answer."""
