"""Secrets of many shapes, and which of them others would see."""
