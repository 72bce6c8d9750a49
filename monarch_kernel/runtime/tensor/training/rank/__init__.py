"""The ranks' side: sums of gradients, modules that live there, copies of a state of training."""
