"""What costs time and memory: programs that measure the code on a GPU."""
