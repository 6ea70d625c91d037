"""The recipes of examples/recipes, trained by their real frameworks and compared with the truth."""
