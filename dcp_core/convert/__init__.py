"""Offline conversion, in one process: from and to full states, Hugging Face directories and other formats."""
