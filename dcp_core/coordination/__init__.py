"""How ranks agree: one exchange protocol over interchangeable carriers."""
