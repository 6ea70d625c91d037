"""Container images: built, fetched, inspected, stored on a node. Imports the containers."""
