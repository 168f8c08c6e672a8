"""Byte primitives: named files in a flat directory."""
