"""A small library with every form of callable that a site can be on."""
