"""The Jupyter kernel: its application, interrupts, kernelspec, magics and output."""
