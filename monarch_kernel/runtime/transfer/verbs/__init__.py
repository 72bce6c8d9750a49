"""The backend for InfiniBand and RoCE cards."""
