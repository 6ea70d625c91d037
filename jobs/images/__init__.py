"""Manage container images: fetch them, resolve those that a conf names, and list unpacked ones.

`fetch.import_image` fetches from a registry, `image.resolve_image` resolves what a conf names,
`store.NodeStore` holds the unpacked images of a node. Imports the conf and the containers.
"""
