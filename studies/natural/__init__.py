"""Natural federations of images, sounds and texts: what a first run chooses, beside what else could be had."""
