"""Hosts on one machine, joined by links as slow as those of a topology."""
