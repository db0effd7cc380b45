"""What is compared: entries, their settings and spaces of values."""
