"""In a rank: operations on DTensors, by DTensor where it is right, else by rules of ours."""
