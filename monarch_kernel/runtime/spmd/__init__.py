"""What programs that run alike on all ranks need: torchrun's environment, and process groups that outlive failures."""
