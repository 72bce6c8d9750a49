"""The debugger as people type it: in cells and in terminals."""
