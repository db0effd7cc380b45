"""A federation with copfl."""
