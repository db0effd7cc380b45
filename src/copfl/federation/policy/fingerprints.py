"""How the fingerprint of a key is written, so that people can compare it by telephone."""

import re

FINGERPRINT = re.compile("[0-9a-f]{4}(-[0-9a-f]{4}){7}")
