"""Container images: fetched, named by a conf, and unpacked on a node.

`fetch.import_image` gets one from a registry, `image.resolve_image` resolves what a conf names,
`store.NodeStore` holds the unpacked ones. Imports the conf and the containers.
"""
