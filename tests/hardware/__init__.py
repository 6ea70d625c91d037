"""Sick, odd and healthy hardware, from the tools' texts to what status and report say."""
