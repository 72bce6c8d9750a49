"""The data that ranks and the controller exchange: stops, stacks, evidence and readings, as plain picklable values."""
