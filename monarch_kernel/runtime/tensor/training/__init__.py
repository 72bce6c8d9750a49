"""Train on sharded meshes: modules with parameters on the ranks, gradients, snapshots, healing and checkpoints."""
