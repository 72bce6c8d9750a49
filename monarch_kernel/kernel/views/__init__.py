"""What the kernel gives to views of meshes: the panel's comm, answers, actions, logs (docs/watching.md)."""
