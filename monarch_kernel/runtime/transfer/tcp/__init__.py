"""The backend that moves bytes by TCP: its connections, and how two processes come to have one."""
