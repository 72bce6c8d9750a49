"""What crosses between ranks and the controller: stops, stacks, evidence and readings, as plain values that pickle."""
