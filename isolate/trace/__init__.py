"""What the native side recorded, readable after the process died."""
