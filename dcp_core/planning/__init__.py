"""Pure planning: from what every rank holds to what every rank writes or reads."""
