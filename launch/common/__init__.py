"""What several programs use: command lines, the DeepSpeed file, log levels, progress, errors."""
