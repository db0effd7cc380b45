"""`copfl bench`: where an algorithm stands, in federations and under a protocol that are the same for all."""
