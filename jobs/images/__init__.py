"""Container images: made, fetched, named by a conf, and unpacked on a node.

`build.build_recipe` makes a file, `fetch.import_image` gets one from a registry,
`image.resolve_image` resolves what a conf names, `store.NodeStore` holds the unpacked ones. Imports
the conf and the containers.
"""
