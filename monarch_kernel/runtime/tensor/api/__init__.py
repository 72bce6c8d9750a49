"""What programs call: activation of meshes, fetches, remote functions, reductions, by Monarch's names."""
