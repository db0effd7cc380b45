"""Tables: files, columns, encoders."""
