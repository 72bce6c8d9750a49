"""The backend that moves bytes through InfiniBand and RoCE cards."""
