"""Stations and the links between them: rates, delays, routes, and what a message between two of them costs."""
