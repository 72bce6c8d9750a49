"""The API for programs, with Monarch's names: activation of meshes, fetches, remote functions, reductions."""
