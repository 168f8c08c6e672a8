"""Pure formats: bytes of files, from and to plain values."""
