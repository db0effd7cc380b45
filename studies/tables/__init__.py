"""Tables: what a site has alone, beside what it gets from its federation, on federations that exist by nature."""
