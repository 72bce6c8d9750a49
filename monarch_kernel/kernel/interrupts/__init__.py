"""Handle Ctrl-C: interrupt code in the kernel, and forward interrupts to the ranks."""
