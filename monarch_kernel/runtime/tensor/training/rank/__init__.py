"""The ranks' side of training: sums of gradients, modules on the ranks, copies of the training state."""
