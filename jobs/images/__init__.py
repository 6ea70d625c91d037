"""Container images: `build.build_recipe` makes a file, `fetch.import_image` gets one from a
registry, `image.resolve_image` resolves what a conf names, `store.NodeStore` has the unpacked ones.

Imports the conf and the containers.
"""
