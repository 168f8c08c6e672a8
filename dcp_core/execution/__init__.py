"""Carrying out plans: storage writers and readers."""
