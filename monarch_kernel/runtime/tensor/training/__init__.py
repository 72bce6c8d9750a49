"""Training on sharded meshes: modules whose parameters are on the ranks, gradients, snapshots, healing, checkpoints."""
