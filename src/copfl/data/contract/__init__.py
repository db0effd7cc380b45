"""The data contract of a federation: what columns, classes and encoders its members agree on."""
