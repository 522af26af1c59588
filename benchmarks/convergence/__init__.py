"""Training runs in pairs: what errors of single steps come to in a loss."""
