"""Programs on meshes without processes: what they would compute, keep and send, by shapes alone."""
